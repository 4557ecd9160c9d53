"""Where every token came from, and where it went: reads what all the others wrote, both ways."""
