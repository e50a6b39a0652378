"""Functions of higher folders that lower ones call: `hf_ring_attention/__init__.py` registers their names."""

#: "module:function" by the name of the function; the first use loads the module.
CALLBACKS: dict[str, str] = {}
