"""The hardware of the papers: names in the catalogue of devices, and how much of its memory a step may use.

One GiB is left for the context, the libraries' own workspaces and fragmentation. This is an assumption, the same for
every method.
"""

V100_PCIE = "V100-PCIe"
V100_NVLINK = "V100-NVLink"
P100_NVLINK = "P100-NVLink"
M40 = "M40"

OF_16_GB = "15GiB"
OF_12_GB = "11GiB"
