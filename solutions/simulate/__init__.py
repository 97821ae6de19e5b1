"""A discrete-event simulator: the engine's own scheduler and blocks, with a model of time in the place of the model."""
