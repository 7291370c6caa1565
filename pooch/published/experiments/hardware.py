"""The papers' hardware: names in the catalogue of devices, and what of its memory a step may take.

One GiB less than there is: for the context, the libraries' own workspaces, and fragmentation. An assumption, the same
for every method.
"""

V100_PCIE = "V100-PCIe"
V100_NVLINK = "V100-NVLink"
M40 = "M40"

OF_16_GB = "15GiB"
OF_12_GB = "11GiB"
