"""The lake appliance's library: vocabulary, wire protocol, and clients.

`import lakefs` is cheap: nothing but this module is loaded until a name is used.
"""
