"""Lab 06, the reference: Triton kernels, each with a plain torch twin, and the launchers that choose between them.

The engine uses these same functions. A launcher runs its kernel compiled on a GPU or interpreted under
`TRITON_INTERPRET=1`, and its twin elsewhere; see `labkit.launch`.
"""
