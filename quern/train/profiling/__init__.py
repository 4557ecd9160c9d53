"""What a step's time goes into: a short traced run of the real trainer, every instant of it accounted for."""
