"""From the tokens of a corpus to the batch of a step."""
