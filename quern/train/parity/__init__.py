"""The parity matrix: compares training on every layout with one process in float64, and names differing tensors.

``matrix`` names the cases, ``corpus`` writes what they read, ``run`` trains one of them on the ranks it is called on,
``compare`` puts the ranks' pieces together and holds them against a run of one process, ``check`` starts the ranks.
"""
