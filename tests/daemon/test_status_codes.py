import grpc

from everstep.core import errors
from everstep.daemon.cli.main import EXIT_CODES
from everstep.daemon.control.status_codes import STATUS_CODES, status_code


def every_class(root: type[errors.EverstepError] = errors.EverstepError) -> set[type[errors.EverstepError]]:
    found = {root}.union(*(every_class(child) for child in root.__subclasses__()))
    return {each for each in found if each.__module__ == errors.__name__}


def test_every_error_has_a_status() -> None:
    assert set(STATUS_CODES) == every_class()
    assert grpc.StatusCode.OK not in STATUS_CODES.values()


def test_what_may_be_tried_again_never_says_that_it_is_hopeless() -> None:
    hopeless = {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
    for kind, code in STATUS_CODES.items():
        assert not (kind.retryable and code in hopeless), kind
        assert kind.retryable or code is not grpc.StatusCode.UNAVAILABLE, kind


def test_a_class_from_elsewhere_has_the_status_of_its_parent() -> None:
    class FullError(errors.NoSpaceError):
        pass

    assert status_code(FullError("full")) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_every_error_has_an_exit_code() -> None:
    for kind in every_class():
        assert next(EXIT_CODES[each] for each in kind.__mro__ if each in EXIT_CODES) in (1, 2, 3), kind
