"""A stand-in for SGLang 0.5.23: the same HTTP contract, its lethal edges included, in a process that starts at once.

`python -m pearl_executor.testing.sglang` behaves like the Python of an environment that has SGLang. Settings may name
it as `engine.sglang.interpreter`: the product's own launch code then runs in it unchanged. It computes no model: the
next token is a function of the weights' bytes and of all tokens before, so that a resumed request must go on alike.
"""
