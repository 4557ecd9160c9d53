"""``quern bench``: what the trainer does in a second, for models, layouts and precisions, over random tokens.

:mod:`.options` what is asked for, :mod:`.rows` what that makes of a training config, :mod:`.run` the processes of each
row, :mod:`.measure` one row on its ranks, :mod:`.figures` the arithmetic.
"""
