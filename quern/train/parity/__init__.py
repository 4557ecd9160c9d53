"""The parity matrix: every layout trains as one process does, in float64, or says which tensor differs.

``matrix`` names the cases, ``corpus`` writes what they read, ``run`` trains one of them on the ranks it is called on,
``compare`` puts the ranks' pieces together and holds them against a run of one process, ``check`` starts the ranks.
"""
