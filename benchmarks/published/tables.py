"""The published numbers, with sizes in bytes and times in seconds unless stated otherwise.

Sources: nccl-tests on 8 A100 and 8 H200: S. Bekman, ml-engineering, network/README.md and
network/benchmarks. p3dn: J. Kahn, gists a92f4425, 1fb3977e, 3150a1a3. InfiniBand: HKBU-HPML, MG-
WFBP, distributed_optimizer.py. Hops: NVIDIA/nccl, src/graph/tuning.cc at 01afd20. H100 over RoCE:
NVIDIA/nccl issue 1368. Horovod: its docs/benchmarks.rst and README. DLPerf: Oneflow-Inc/DLPerf,
dlperf_benchmark_test_report_v1.md. MXNet: example/image-classification/README. TensorFlow:
docs_src/performance/benchmarks.md at 5984ffe. Facebook: developer.nvidia.com on Goyal et al. Null
steps: notes on TensorFlow, OSDI 2016. Piz Daint and p2.8xlarge: e-bug, distributed-tensorflow-
benchmarks, report/source/benchmarks.tex. Megatron: Korthikanti et al., "Reducing activation
recomputation in large transformer models", 2022, tables 3 to 5, as in calculon's validation.
"""

from __future__ import annotations

KB, MB, GB = 2**10, 2**20, 2**30

# -- all-reduce ---------------------------------------------------------------------------

#: nccl-tests on 8 A100 with NVLink: bytes -> µs.
A100 = {
    32 * KB: 43.83,
    256 * KB: 61.38,
    MB: 101.9,
    4 * MB: 101.5,
    8 * MB: 133.5,
    16 * MB: 276.6,
    64 * MB: 684.6,
    256 * MB: 2420.6,
    GB: 8203.9,
    4 * GB: 32136,
    16 * GB: 127997,
}

#: The same on 8 H200, NCCL 2.27: bytes -> bus bandwidth [GB/s].
H200 = {
    32 * KB: 1.44,
    256 * KB: 11.74,
    MB: 39.93,
    4 * MB: 107.2,
    16 * MB: 219.9,
    64 * MB: 346.5,
    256 * MB: 436.2,
    GB: 463.6,
    16 * GB: 482.3,
}

#: Eight bytes on p3dn (8 V100 each): nodes -> µs.
P3DN = {2: 163.4, 4: 319.4, 8: 631.3}

#: Lines fitted to 56 Gb/s InfiniBand, T = a + b·bytes: workers -> (a [s], b [s/byte]). The
#: lines for 2 and 4 workers, inside a node, exceed the bandwidth of the wire and are omitted.
INFINIBAND = {8: (9.75e-5, 3.06e-10), 16: (2.358e-4, 4.06e-10)}

#: NCCL's own constants for the Simple protocol on a ring. NCCL_PCIE and NCCL_NET are the times of a
#: PCIe hop and of a network hop [µs]. NCCL_PLATEAU multiplies the latency over several nodes.
NCCL_PCIE, NCCL_NET, NCCL_PLATEAU = 5.7, 9.6, 1.9
#: NCCL's ratio of a tree's bandwidth to a ring's.
NCCL_TREE = 0.9

#: 40 H100 with four 400 Gb/s RoCE NICs per node: bus bandwidth [GB/s].
ROCE = {"ring": 190.0, "tree": 150.0}

# -- training with all-reduce -------------------------------------------------------------

#: tf_cnn_benchmarks with Horovod, 4 Pascal GPUs per server, 25 Gb/s RoCE, batch 64:
#: (bytes of gradients, images/s of one GPU, efficiency on 128 and on 512 GPUs).
HOROVOD = {
    "Inception-v3": (109e6, 142.0, 0.90, 0.90),
    "ResNet-101": (178e6, 1656.82 / 16, 0.90, 0.90),
    "VGG-16": (553e6, 154.0, 0.79, 0.68),
}
HOROVOD_FUSION = 64e6

#: DLPerf 2020, 4 nodes of 8 V100, one 100 Gb/s NIC each: batch, samples/s on 1, 8, 16, 32 GPUs.
DLPERF = {
    "ResNet-50 b128 OneFlow": (128, 384.85, 2969.45, 5906.55, 11711.18),
    "ResNet-50 b128 PyTorch": (128, 354.40, 2719.07, 5307.21, 10632.33),
    "ResNet-50 b128 TF1 + Horovod": (128, 362.44, 2721.98, 5099.42, 9514.64),
    "ResNet-50 b96 MXNet + Horovod": (96, 389.71, 2947.72, 5684.68, 10419.21),
    "BERT-base b96 OneFlow": (96, 149.84, 1158.51, 2257.71, 4455.97),
    "BERT-base b32 OneFlow": (32, 145.21, 1042.98, 1890.26, 3715.08),
    "BERT-base b32 TF1 + Horovod": (32, 106.80, 806.56, 1090.20, 1923.68),
    "BERT-base b32 MXNet + Horovod": (32, 127.05, 928.03, 1136.44, 1895.50),
}

#: MXNet, 16 nodes of 16 K80, dist_device_sync: batch, images/s on 1, 2, 4 … 256 GPUs.
MXNET = {
    "AlexNet": (
        512,
        457.07,
        870.43,
        1514.8,
        2852.5,
        4244.18,
        7945.57,
        15840.52,
        31334.88,
        61938.36,
    ),
    "Inception-v3": (32, 30.4, 59.61, 117.9, 233.39, 447.61, 882.57, 1761.24, 3416.2, 6660.98),
    "ResNet-152": (32, 20.08, 38.76, 77.01, 153.07, 298.03, 595.53, 1179.86, 2333.47, 4630.42),
}

#: TensorFlow on a DGX-1 with P100: batch, images/s on 1, 2, 4, 8 GPUs.
DGX1 = {
    "Inception-v3, variables on the CPU": (64, 142, 284, 569, 1131),
    "ResNet-50, variables on the CPU": (64, 219, 422, 852, 1734),
    "ResNet-152, variables on the CPU": (64, 91.8, 181, 356, 716),
    "AlexNet, NCCL": (512, 2987, 5658, 10509, 17822),
    "VGG-16, NCCL": (64, 154, 295, 584, 1081),
    "VGG-16 b32, NCCL": (32, 144, 281, 549, 820),
}

#: TensorFlow on p2.8xlarge, 8 K80 per node: batch, images/s on 1, 8, 16, 32, 64 GPUs.
P2 = {
    "Inception-v3": (64, 29.7, 229, 459, 902, 1783),
    "ResNet-50": (64, 52.4, 378, 751, 1388, 2744),
    "ResNet-152": (32, 19.4, 146, 291, 565, 981),
}

#: Goyal et al., 32 servers of 8 P100, 50 Gb/s Ethernet, 100 MB of gradients, 120 ms of backward: 29
#: hours on 8 GPUs became one hour on 256.
FACEBOOK = 29 / 32

# -- pipelines ----------------------------------------------------------------------------

#: Zero Bubble, table 3, pipelines of 8 A100: samples/s per GPU with 24, 32 and 64 micro-batches.
ZERO_BUBBLE = {
    "1.5B": {
        "ZB-2P": (14.5, 14.8, 14.9),
        "ZB-1P": (12.9, 13.4, 14.2),
        "1F1B": (11.8, 12.5, 13.6),
        "1F1B-I": (13.1, 13.4, 13.9),
    },
    "6.2B": {
        "ZB-2P": (4.32, 4.35, 4.39),
        "ZB-1P": (3.88, 4.00, 4.20),
        "1F1B": (3.50, 3.70, 4.03),
        "1F1B-I": (4.01, 4.08, 4.19),
    },
}
ZERO_BUBBLE_MICROBATCHES = (24, 32, 64)
#: Each model's layers, hidden size, and samples per micro-batch.
ZERO_BUBBLE_MODELS = {"1.5B": (22, 2304, 6), "6.2B": (30, 4096, 3)}

# -- parameter server ---------------------------------------------------------------------

#: TensorFlow's null step, 16 servers: (bytes, workers) -> seconds.
NULL_STEPS = {
    (0, 1): 1.8e-3,
    (0, 100): 8.8e-3,
    (100e6, 1): 0.147,
    (100e6, 100): 0.613,
    (1e9, 1): 1.01,
    (1e9, 100): 7.16,
}

#: Inception-v3, batch 64, on Piz Daint (one P100 per node): (workers, servers) -> images/s.
PIZ_DAINT = {
    (1, 1): 138.23,
    (2, 1): 264.57,
    (8, 2): 1018.18,
    (16, 4): 2001.00,
    (32, 12): 3840.35,
    (64, 40): 7118.31,
    (128, 116): 9219.70,
}

#: The same on p2.8xlarge, with gradients first summed on each node: (GPUs, servers) -> images/s.
P2_SERVED = {
    (1, 1): 30.55,
    (8, 1): 230.75,
    (16, 1): 448.57,
    (32, 3): 863.72,
    (64, 8): 1731.31,
    (128, 16): 3333.20,
}

# -- jobs ---------------------------------------------------------------------------------

#: Megatron on A100 with 80 GB, 2,048 tokens per sample (Korthikanti et al., 2022). Each value has
#: three tuples: (layers, width, heads, tp, pp, chunks, batch, micro-batch); the time of a step [s]
#: with full recomputation, and with selective recomputation and sequence parallelism; and the size
#: [GiB] of the states, of all activations, and of the activations with selective recomputation.
MEGATRON = {
    "22B": ((48, 6144, 64, 8, 1, 1, 4, 4), (1.42, 1.10), (45.5625, 59.25, 9.5625)),
    "175B": (
        (96, 12288, 96, 8, 8, 3, 64, 1),
        (18.13, 13.75),
        (45.5625, 66.84375, 12.3515625),
    ),
    "530B": (
        (105, 20480, 128, 8, 35, 3, 280, 1),
        (49.05, 37.83),
        (31.640625, 114.0234375, 23.076171875),
    ),
    "1T": (
        (128, 25600, 160, 8, 64, 1, 512, 1),
        (94.42, 71.49),
        (32.958984375, 131.25, 26.5625),
    ),
}

#: Published numbers that are not predicted here, with the reason.
NOT_PREDICTED = {
    "2 DGX-A100, small messages, 93 µs": "neither size nor protocol is stated; NCCL's constants "
    "allow 22 µs (LL) to 123 µs (Simple)",
    "10 Gb/s Ethernet lines of MG-WFBP": "they exceed the wire's bandwidth",
    "Summit, double binary trees": "published as a plot only",
    "Horovod over TCP; its 50% of a parameter server": "servers and TCP streams are not stated",
    "DDP's gains from overlap": "fractions of step times, which are not stated",
    "BytePS's gains": "the number of CPU machines is not stated; its formula is tested exactly",
    "MLPerf, Tencent, Sony, DAWNBench": "times to train, which also depend on the number of epochs",
    "TensorFlow's sparse null steps": "the rows' size is not stated",
    "Inception-v3 on 200 workers, 17 servers": "no row with one worker to fit",
    "Poseidon": "speed-ups without step times",
}
