"""Small models and routes for tests of routing; no process group needed."""

from typing import Any

import torch

from megatron_eopt.config.settings import resolve
from megatron_eopt.routing.groups import Group, build_groups, summarize
from megatron_eopt.routing.parameters import trainable_parameters
from megatron_eopt.routing.places import places_in
from megatron_eopt.routing.routes import Route, route_all


class Toy(torch.nn.Module):
    """Embedding tables, matrices, norms, biases, an expert, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(8, 4)
        self.positions = torch.nn.Embedding(6, 4)
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.expert = torch.nn.Linear(4, 2, bias=False)
        self.expert.weight.allreduce = False
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        self.chosen = torch.nn.Linear(4, 4, bias=False)
        self.chosen.weight.use_muon = False


def routes_of(config: Any, overrides: Any = None, model: torch.nn.Module | None = None) -> Any:
    """Return the routes of ``model`` by name."""
    parameters = trainable_parameters(places_in([model or Toy()]))
    routes = route_all(parameters, overrides or {}, resolve(config))
    return {route.parameter.name: route for route in routes}


def groups_of(routes: list[Route], *others: list[Route]) -> list[Group]:
    """Return the groups of the rank that has ``routes`` while other ranks have ``others``."""
    gather_unique = [summary for rank in (routes, *others) for summary in summarize(rank)]
    return build_groups(routes, gather_unique)
