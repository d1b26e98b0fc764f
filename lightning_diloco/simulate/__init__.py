"""Simulation of the real protocol state machines with a simulated network, disk and clock; forecasts of runs."""

from lightning_diloco.simulate.crashes import CrashPoints
from lightning_diloco.simulate.fleet import Fleet
from lightning_diloco.simulate.learner import SimulatedLearner
from lightning_diloco.simulate.reading import Data
from lightning_diloco.simulate.settings import Network, Pace

__all__ = ["CrashPoints", "Data", "Fleet", "Network", "Pace", "SimulatedLearner"]
