"""Built-in networks, and any torch module as a function of a flat parameter vector."""
