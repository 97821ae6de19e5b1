"""What a grading run leaves behind: JSON, CSV and a table, all from the same results."""
