"""The Megatron-core backend: a policy whose layers are cut over tensor-parallel ranks.

`architecture` reads what a Hugging Face model is, `build` makes Megatron's model of it,
`layout` says which tensors of the one make up a parameter of the other, `masters` keeps the
float32 weights under their Hugging Face names, `policy` runs packed rows, and `place` puts it
all together. Only `build` imports megatron, and only when it is called.
"""
