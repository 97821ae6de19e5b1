"""What a grading run leaves behind: pages, JSON, CSV and a table, all from the same results."""
