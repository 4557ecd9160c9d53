"""Mixing laws: held-out losses as functions of the mixture, fitted to small runs, and the mixture they propose.

:mod:`.fit` the functions, their parameters and errors, :mod:`.simplex` the convex minimisation, :mod:`.propose` the
proposal and what it is worth, :mod:`.tables` runs of others.
Needs numpy and scipy alone.
"""
