"""The public API for training loops: ``Agent`` keeps a DiLoCo worker in a run.

See ``agent.Agent`` for the loop, ``config.AgentConfig`` for the settings, ``recovery.state.WorkerState`` for naming
what a worker's state is.
"""

from recovery.worker.agent import Agent
from recovery.worker.boundary import Boundary
from recovery.worker.config import AgentConfig

__all__ = ["Agent", "AgentConfig", "Boundary"]
