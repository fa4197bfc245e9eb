"""Views of devices to and from the messages of the control API. Pure translation."""

from ...proto import node_pb2 as pb
from .device_views import DeviceDetail, PartView, ReadmitView, RetireView, StoreDevices
from .messages import DEVICE_STATE_OF, DEVICE_STATES, id_from_text, id_to_text


def devices_to_message(stores: list[StoreDevices]) -> pb.ListDevicesResponse:
    """Return the message of these stores' devices."""
    return pb.ListDevicesResponse(
        stores=[
            pb.StoreDevices(
                store_id=store.store_id, devices=[device_to_message(each) for each in store.devices]
            )
            for store in stores
        ]
    )


def devices_from_message(message: pb.ListDevicesResponse) -> list[StoreDevices]:
    """Return the devices of a message."""
    return [
        StoreDevices(
            store_id=store.store_id, devices=tuple(device_from_message(each) for each in store.devices)
        )
        for store in message.stores
    ]


def device_to_message(device: DeviceDetail) -> pb.DeviceDetail:
    """Return the message of a device."""
    return pb.DeviceDetail(
        device_id=device.device_id,
        path=device.path,
        state=DEVICE_STATES[device.state],
        reason=device.reason,
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        held_bytes=device.held_bytes,
        pool_bytes=device.pool_bytes,
        parts=[_part_to_message(part) for part in device.parts],
        drained=device.is_drained,
        retired_unix_s=device.retired_unix_s,
        missing_since_unix_s=device.missing_since_unix_s,
        name=device.name,
        highest={key: str(checkpoint) for key, checkpoint in device.highest.items()},
    )


def device_from_message(device: pb.DeviceDetail) -> DeviceDetail:
    """Return the device of a message."""
    highest = {key: id_from_text(text) for key, text in device.highest.items()}
    return DeviceDetail(
        device_id=device.device_id,
        path=device.path,
        state=DEVICE_STATE_OF[device.state],
        reason=device.reason,
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        held_bytes=device.held_bytes,
        pool_bytes=device.pool_bytes,
        parts=tuple(_part_from_message(part) for part in device.parts),
        is_drained=device.drained,
        retired_unix_s=device.retired_unix_s,
        missing_since_unix_s=device.missing_since_unix_s,
        name=device.name,
        highest={key: checkpoint for key, checkpoint in highest.items() if checkpoint is not None},
    )


def _part_to_message(part: PartView) -> pb.HeldPart:
    return pb.HeldPart(
        run_name=part.run_name,
        owner_uid=part.owner_uid,
        checkpoint=str(part.checkpoint),
        size_bytes=part.size_bytes,
        offered=part.is_offered,
        newest=part.is_newest,
        newest_elsewhere=id_to_text(part.newest_elsewhere),
    )


def _part_from_message(part: pb.HeldPart) -> PartView:
    checkpoint = id_from_text(part.checkpoint)
    assert checkpoint is not None, "a part is of a checkpoint"
    return PartView(
        run_name=part.run_name,
        owner_uid=part.owner_uid,
        checkpoint=checkpoint,
        size_bytes=part.size_bytes,
        is_offered=part.offered,
        is_newest=part.newest,
        newest_elsewhere=id_from_text(part.newest_elsewhere),
    )


def retirement_from_message(message: pb.RetireDeviceResponse) -> RetireView:
    """Return the retirement of a message."""
    return RetireView(device=device_from_message(message.device), problems=tuple(message.problems))


def readmission_from_message(message: pb.ReadmitDeviceResponse) -> ReadmitView:
    """Return the readmission of a message."""
    return ReadmitView(
        device=device_from_message(message.device), is_new=message.new_device, aside=message.aside
    )
