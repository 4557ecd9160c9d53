"""What a failed rank leaves in ``RUN/debug``: its record of collectives, and a snapshot of its GPU's memory."""
