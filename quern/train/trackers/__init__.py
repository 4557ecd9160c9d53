"""Where metrics are shown: TensorBoard's files, and a process for each other tracker."""
