"""What keeps the labs sound: stubs from the reference, and tests that known wrong code can't pass."""
