"""The grader: runs submissions in isolation, judges what comes back and writes the reports."""
