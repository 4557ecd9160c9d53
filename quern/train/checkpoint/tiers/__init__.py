"""Where the files of checkpoints are besides the run's folder: on the nodes' own disks, and in a store behind them."""
