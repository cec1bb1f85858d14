"""What may go wrong in a run: a file for each part of the world where it does."""

from chaos.actions import clients, disk_and_clock, handlers, models, processes
from chaos.actions.action import ACTIONS, Action

__all__ = ["ACTIONS", "Action", "clients", "disk_and_clock", "handlers", "models", "processes"]
