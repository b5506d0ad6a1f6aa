"""The contract with SGLang: what is used of each release, and one class per release for what differs.

`installed` is the object of the installed release's class, and not the module of that name that chooses it.
"""

from sglang_mla_ext.adapter.compat.installed import installed as installed
