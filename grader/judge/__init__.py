"""What student code may never see: reference mathematics, tolerances and tests of distributions."""
