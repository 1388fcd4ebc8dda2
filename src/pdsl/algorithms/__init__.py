"""Decentralised learning algorithms, one file each, and `ALGORITHMS`, all of them by name."""

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.cga import CGA, DPCGA
from pdsl.algorithms.d_psgd import DPSGD
from pdsl.algorithms.def_kt import DefKT
from pdsl.algorithms.dfedsam import DFedSAM, DFedSAMMGS
from pdsl.algorithms.dmsgd import DMSGD
from pdsl.algorithms.dp_admm import DPADMM
from pdsl.algorithms.dp_dpsgd import DPDPSGD
from pdsl.algorithms.gradient_tracking import GradientTracking
from pdsl.algorithms.gut import GUT
from pdsl.algorithms.momentum_tracking import MomentumTracking
from pdsl.algorithms.mspd import MSPD
from pdsl.algorithms.muffliato import Muffliato
from pdsl.algorithms.net_fleet import DPNetFleet, NetFleet
from pdsl.algorithms.ngc import NGC
from pdsl.algorithms.pdsl import PDSL
from pdsl.algorithms.qg_dsgdm import QGDSGDm
from pdsl.algorithms.soft_dsgd import SoftDSGD

_IN_ORDER: tuple[type[Algorithm], ...] = (
    PDSL,
    # the paper's four baselines
    DPDPSGD,
    Muffliato,
    DPCGA,
    DPNetFleet,
    # other algorithms cited in the paper
    DPSGD,
    DMSGD,
    CGA,
    NGC,
    NetFleet,
    QGDSGDm,
    GradientTracking,
    MomentumTracking,
    GUT,
    DFedSAM,
    DFedSAMMGS,
    SoftDSGD,
    MSPD,
    DefKT,
    DPADMM,
)
ALGORITHMS: dict[str, type[Algorithm]] = {algorithm.name: algorithm for algorithm in _IN_ORDER}

__all__ = [
    "ALGORITHMS",
    "CGA",
    "DMSGD",
    "DPADMM",
    "DPCGA",
    "DPDPSGD",
    "DPSGD",
    "GUT",
    "MSPD",
    "NGC",
    "PDSL",
    "Algorithm",
    "DFedSAM",
    "DFedSAMMGS",
    "DPNetFleet",
    "DefKT",
    "GradientTracking",
    "Metrics",
    "MomentumTracking",
    "Muffliato",
    "NetFleet",
    "QGDSGDm",
    "Round",
    "SoftDSGD",
]
