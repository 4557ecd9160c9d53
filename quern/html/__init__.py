"""Makes the HTML pages of reports: their frame and look, and the pieces that they are made of."""
