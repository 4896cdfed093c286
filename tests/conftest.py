"""What all tests need: to be understood by the installed version of transformers, and to fail for no slow machine."""

import old_versions  # noqa: F401 (says names anew where they are old)
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
