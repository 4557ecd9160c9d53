"""``quern bench``: measures the trainer's speed on random tokens, by model, layout and precision.

:mod:`.options` what is asked for, :mod:`.rows` what that makes of a training config, :mod:`.run` the processes of each
row, :mod:`.measure` one row on its ranks, :mod:`.figures` the arithmetic.
"""
