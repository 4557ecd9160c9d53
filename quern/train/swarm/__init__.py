"""A swarm: small runs of one config on many mixtures, whose losses mixing laws are fitted to.

:mod:`.config` what is asked for, :mod:`.plan` the run of each mixture, :mod:`.run` a process for each.
"""
