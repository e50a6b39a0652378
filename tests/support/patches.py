"""Parts of modules and objects that a test replaces."""


def replaced(monkeypatch, owner, **values):
    """Replaces these attributes of a module or an object until the test ends."""
    for name, value in values.items():
        monkeypatch.setattr(owner, name, value)
