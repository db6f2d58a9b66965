"""Customer service: a tiny model learns to follow a shop's policy, with tools and a customer who must be asked."""

from .model import make_model
from .service import CustomerService, Scenario, create_customer_service_reward, grade, make_scenarios

__all__ = ["CustomerService", "Scenario", "create_customer_service_reward", "grade", "make_model", "make_scenarios"]
