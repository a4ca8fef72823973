"""Code that is not part of this package: objects named `module:object`, commands, and hashes."""
