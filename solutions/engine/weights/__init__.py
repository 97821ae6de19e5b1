"""How the engine holds the matrices of a model: plain, rounded when they are loaded, or as a checkpoint stores them."""
