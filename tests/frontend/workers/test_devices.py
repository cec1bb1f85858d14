import pytest

from marserve.frontend.workers.devices import DeviceAllocator, visible_names


def test_the_least_crowded_gpu_is_next_the_lowest_number_first():
    devices = DeviceAllocator(3)
    assert [devices.acquire() for _ in range(4)] == [(0,), (1,), (2,), (0,)]
    devices.release((1,))
    assert devices.acquire() == (1,)


def test_only_the_allowed_gpus_are_dealt_out_in_their_order():
    devices = DeviceAllocator(4)
    assert [devices.acquire(1, (3, 1)) for _ in range(3)] == [(3,), (1,), (3,)]
    assert devices.acquire() == (0,)


def test_blocks_are_neighbours_and_the_least_crowded_is_next():
    devices = DeviceAllocator(5)
    devices.acquire()
    assert [devices.acquire(2) for _ in range(3)] == [(2, 3), (0, 1), (2, 3)]
    devices.release((2, 3))
    devices.release((2, 3))
    assert devices.acquire(2) == (2, 3)
    assert devices.acquire(2, (4, 0, 2)) == (4, 0)


@pytest.mark.parametrize(
    ("count", "size", "allowed", "capacity"),
    [(8, 2, None, 4), (8, 3, None, 2), (8, 2, (1, 5, 6), 1), (1, 2, None, 0), (0, 1, None, 0)],
)
def test_the_capacity_is_how_many_blocks_there_are(count, size, allowed, capacity):
    assert DeviceAllocator(count).capacity(size, allowed) == capacity


@pytest.mark.parametrize(
    ("environment", "names"),
    [({}, "2,3"), ({"CUDA_VISIBLE_DEVICES": "7, 6,GPU-ab,4"}, "GPU-ab,4")],
)
def test_gpus_are_named_as_the_servers_own_view_of_them_wants(environment, names):
    assert visible_names((2, 3), environment) == names


@pytest.mark.parametrize(("count", "allowed"), [(0, None), (0, (1,)), (2, ())])
def test_without_a_gpu_the_worker_runs_on_the_cpu(count, allowed):
    devices = DeviceAllocator(count)
    assert devices.acquire(1, allowed) == ()
    devices.release(())
