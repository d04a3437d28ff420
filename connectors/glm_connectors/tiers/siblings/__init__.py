"""Ranks of one machine that hold the same pages get each from Valkey once, and the others' from each other's memory.

    place = siblings.Place(share)              # every rank, at the same point
    addresses = …                              # of all ranks, exchanged by whoever knows them (`place.address`)
    family = siblings.Siblings(place, addresses)
    TieredStore(config, space, writer=True, share=share, siblings=family)

A page is its owner's to get, the one that puts it (`Share`). The owner lends it: it holds the page and says where it
lies, and the other copies it out of the owner's memory (`process_vm_readv`) and checks it as if it had come from
Valkey. That Valkey has not got a page, or fails, the owner's word is taken for; what is otherwise not lent comes from
Valkey, and is counted. An owner answers in time, if only that pages are on their way, and is asked again: who says
nothing at all is not asked until he does.
"""

from __future__ import annotations

from glm_connectors.tiers.siblings.desk import Lender
from glm_connectors.tiers.siblings.family import STATES, Siblings
from glm_connectors.tiers.siblings.memory import copy_from
from glm_connectors.tiers.siblings.place import Address, Place
from glm_connectors.tiers.siblings.wire import Ending, Loan

__all__ = ["STATES", "Address", "Ending", "Lender", "Loan", "Place", "Siblings", "copy_from"]
