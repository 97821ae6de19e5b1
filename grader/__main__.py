"""`python -m grader`: grade, hint, samples, and the author's commands."""

from grader.cli import main

if __name__ == "__main__":
    main()
