"""Plans are integers: hypothesis looks for the smallest problem that fails, as long as it takes."""

from hypothesis import HealthCheck, settings

settings.register_profile("plans", deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.load_profile("plans")
