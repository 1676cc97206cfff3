from hypothesis import settings

# How fast an example runs says nothing about whether it is right.
settings.register_profile("sampling", deadline=None)
settings.load_profile("sampling")
