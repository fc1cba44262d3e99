"""The four services. Each imports the library `headway`, never another service."""
