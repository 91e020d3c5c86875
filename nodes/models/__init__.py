"""Export the models of this app, where Django looks for them."""

from nodes.models.acceptance import Acceptance
from nodes.models.assessments import Assessment
from nodes.models.burnin import BurnIn, BurnInNode, BurnInTest, GoldenRecord
from nodes.models.facts import (
    Association,
    AssociationQuerySet,
    Fact,
    License,
    Node,
    Partition,
    Qos,
    QueuedJob,
    Reading,
    Reservation,
)
from nodes.models.health import ActionPolicy, HealthControl, HealthEntry, SiteRule
from nodes.models.maintenance import MaintenanceWindow
from nodes.models.notes import NodeNote
from nodes.models.orders import NodeOrder
from nodes.models.racks import RackPlace
from nodes.models.spares import HotSpare
from nodes.models.telemetry import Agent, AgentStream, EnrolmentSecret, Frame, Gpu, GpuPlace, GpuUse, Holding, NodeEvent
from nodes.models.temperatures import NodeThermals, RackTemperature

__all__ = [
    "Acceptance",
    "ActionPolicy",
    "Agent",
    "AgentStream",
    "Assessment",
    "Association",
    "AssociationQuerySet",
    "BurnIn",
    "BurnInNode",
    "BurnInTest",
    "EnrolmentSecret",
    "Fact",
    "Frame",
    "GoldenRecord",
    "Gpu",
    "GpuPlace",
    "GpuUse",
    "HealthControl",
    "HealthEntry",
    "Holding",
    "HotSpare",
    "License",
    "MaintenanceWindow",
    "Node",
    "NodeEvent",
    "NodeNote",
    "NodeOrder",
    "NodeThermals",
    "Partition",
    "Qos",
    "QueuedJob",
    "RackPlace",
    "RackTemperature",
    "Reading",
    "Reservation",
    "SiteRule",
]
