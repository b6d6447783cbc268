"""Plug-ins: the lake behind the interfaces of other libraries.  Nothing else imports them."""
