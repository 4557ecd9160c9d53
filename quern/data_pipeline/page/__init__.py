"""What a page is: its text, measurements and verdict, its id and its URL."""
