"""The book: one site from handouts, notebooks and the code that they speak of. `make book` builds it."""
