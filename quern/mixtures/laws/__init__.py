"""Mixing laws: held-out losses as functions of the mixture, fitted to small runs, and the mixture they propose.

:mod:`.forms` the functions, :mod:`.fit` their parameters and errors, :mod:`.simplex` the convex minimisation,
:mod:`.propose` the proposal and what it is worth, :mod:`.draw` mixtures to try, :mod:`.tables` runs of others.
Needs numpy and scipy alone.
"""
