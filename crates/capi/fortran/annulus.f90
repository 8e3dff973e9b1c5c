! annulus for Fortran 2018: the functions of annulus.h, and wrappers for arrays of real(c_float) and
! real(c_double).
!
! An array of Fortran has the axes of the C tensor in reverse: q(head_dim, q_heads, q_len, batch),
! lse(q_len, q_heads, batch), bias(kv_len, q_len, q_heads, batch), softmax_aux(sinks, q_heads),
! segment ids and positions (rows, batch). Arrays are of any shape and stride, and are read and
! written in place; a stride below 0 is refused.
!
! Every function returns a status: ANNULUS_SUCCESS, or another number that annulus_message explains.
! Row numbers and ranks count from 0, as in C. A communicator is an integer: comm of module mpi,
! comm%MPI_VAL of module mpi_f08. The comments of annulus.h define everything else.
module annulus
  use, intrinsic :: iso_c_binding
  implicit none
  private

  public :: annulus_options, annulus_tensor, annulus_batch, annulus_pair
  public :: annulus_step_event
  public :: annulus_forward_args, annulus_backward_args, annulus_attend_args
  public :: annulus_options_default, annulus_message, annulus_error_text, annulus_version_text
  public :: annulus_attention_create, annulus_attention_destroy, annulus_attention_add_mask
  public :: annulus_attention_set_bias_function, annulus_attention_set_alibi
  public :: annulus_attention_set_custom_layout, annulus_attention_set_balanced_layout
  public :: annulus_attention_q_rows, annulus_attention_kv_rows, annulus_attention_on_silence
  public :: annulus_attention_on_step, annulus_attention_set_machine
  public :: annulus_attention_set_documents, annulus_attention_add_neighborhood
  public :: annulus_attention_set_boxes_layout
  public :: annulus_attention_set_bias_table
  public :: annulus_attention_set_cuda_stream, annulus_attention_set_nccl_communicator
  public :: annulus_endpoint_create_mpi, annulus_endpoint_destroy
  public :: annulus_plan_create_endpoint, annulus_cache_create_endpoint
  public :: annulus_plan_create_threads, annulus_plan_create_mpi
  public :: annulus_plan_destroy, annulus_plan_rank, annulus_plan_ranks, annulus_plan_layout
  public :: annulus_plan_route, annulus_plan_strategy, annulus_plan_grid
  public :: annulus_plan_workspace_bytes
  public :: annulus_plan_predicted_bytes, annulus_plan_numerics, annulus_plan_q_rows
  public :: annulus_plan_kv_rows, annulus_plan_update, annulus_plan_list_bias_gradient
  public :: annulus_tensor_of
  public :: annulus_forward, annulus_backward, annulus_forward_c, annulus_backward_c
  public :: annulus_forward_start, annulus_backward_start, annulus_plan_test, annulus_plan_wait
  public :: annulus_cache_create_threads, annulus_cache_create_mpi
  public :: annulus_cache_destroy, annulus_cache_append, annulus_cache_append_own
  public :: annulus_cache_own_rows, annulus_cache_truncate, annulus_cache_attend, annulus_cache_len
  public :: annulus_cache_local_len, annulus_cache_page_rows, annulus_cache_rank
  public :: annulus_cache_ranks, annulus_cache_predicted_bytes, annulus_cache_buffer_bytes
  public :: annulus_cache_append_c, annulus_cache_append_own_c, annulus_cache_attend_c

  integer(c_int32_t), parameter, public :: ANNULUS_SUCCESS = 0
  integer(c_int32_t), parameter, public :: ANNULUS_INVALID_ARGUMENT = 1
  integer(c_int32_t), parameter, public :: ANNULUS_UNSUPPORTED = 2
  integer(c_int32_t), parameter, public :: ANNULUS_RANK_MISMATCH = 3
  integer(c_int32_t), parameter, public :: ANNULUS_REFUSED = 4
  integer(c_int32_t), parameter, public :: ANNULUS_OUT_OF_MEMORY = 20
  integer(c_int32_t), parameter, public :: ANNULUS_IO = 21
  integer(c_int32_t), parameter, public :: ANNULUS_ARRIVAL_TIMEOUT = 22
  integer(c_int32_t), parameter, public :: ANNULUS_DEVICE = 40
  integer(c_int32_t), parameter, public :: ANNULUS_COMM = 41
  integer(c_int32_t), parameter, public :: ANNULUS_TIMEOUT = 42
  integer(c_int32_t), parameter, public :: ANNULUS_PEER_LOST = 43
  integer(c_int32_t), parameter, public :: ANNULUS_ABORTED = 44
  integer(c_int32_t), parameter, public :: ANNULUS_POISONED = 45
  integer(c_int32_t), parameter, public :: ANNULUS_INTERNAL = 46
  integer(c_int32_t), parameter, public :: ANNULUS_ABI_VERSION = 1
  integer(c_int32_t), parameter, public :: ANNULUS_F32 = 1
  integer(c_int32_t), parameter, public :: ANNULUS_F64 = 2
  integer(c_int32_t), parameter, public :: ANNULUS_F16 = 3
  integer(c_int32_t), parameter, public :: ANNULUS_BF16 = 4
  integer(c_int32_t), parameter, public :: ANNULUS_I8 = 5
  integer(c_int32_t), parameter, public :: ANNULUS_I16 = 6
  integer(c_int32_t), parameter, public :: ANNULUS_I32 = 7
  integer(c_int32_t), parameter, public :: ANNULUS_I64 = 8
  integer(c_int32_t), parameter, public :: ANNULUS_U8 = 9
  integer(c_int32_t), parameter, public :: ANNULUS_BOOL = 10
  integer(c_int32_t), parameter, public :: ANNULUS_NONE = -1
  ! options.toml: constants
  integer(c_int32_t), parameter, public :: ANNULUS_ALIGN_TOP_LEFT = 0
  integer(c_int32_t), parameter, public :: ANNULUS_ALIGN_BOTTOM_RIGHT = 1
  integer(c_int32_t), parameter, public :: ANNULUS_BIAS_AFTER_SOFT_CAP = 0
  integer(c_int32_t), parameter, public :: ANNULUS_BIAS_BEFORE_SOFT_CAP = 1
  integer(c_int32_t), parameter, public :: ANNULUS_PRECISION_HIGHEST = 0
  integer(c_int32_t), parameter, public :: ANNULUS_PRECISION_HIGH = 1
  integer(c_int32_t), parameter, public :: ANNULUS_PRECISION_DEFAULT = 2
  integer(c_int32_t), parameter, public :: ANNULUS_BACKWARD_ONE_PASS = 0
  integer(c_int32_t), parameter, public :: ANNULUS_BACKWARD_TWO_PASS = 1
  integer(c_int32_t), parameter, public :: ANNULUS_LAYOUT_AUTO = 0
  integer(c_int32_t), parameter, public :: ANNULUS_LAYOUT_CONTIGUOUS = 1
  integer(c_int32_t), parameter, public :: ANNULUS_LAYOUT_ZIGZAG = 2
  integer(c_int32_t), parameter, public :: ANNULUS_LAYOUT_STRIPED = 3
  integer(c_int32_t), parameter, public :: ANNULUS_LAYOUT_CUSTOM = 4
  integer(c_int32_t), parameter, public :: ANNULUS_LAYOUT_BALANCED = 5
  integer(c_int32_t), parameter, public :: ANNULUS_ROUTE_AUTO = 0
  integer(c_int32_t), parameter, public :: ANNULUS_ROUTE_RELAY_UP = 1
  integer(c_int32_t), parameter, public :: ANNULUS_ROUTE_RELAY_DOWN = 2
  integer(c_int32_t), parameter, public :: ANNULUS_ROUTE_DIRECT = 3
  integer(c_int32_t), parameter, public :: ANNULUS_ROUTE_RAILS_UP = 4
  integer(c_int32_t), parameter, public :: ANNULUS_ROUTE_RAILS_DOWN = 5
  integer(c_int32_t), parameter, public :: ANNULUS_ROUTE_ONCE_PER_NODE = 6
  integer(c_int32_t), parameter, public :: ANNULUS_STRATEGY_RING = 0
  integer(c_int32_t), parameter, public :: ANNULUS_STRATEGY_HEADS_RING = 1
  integer(c_int32_t), parameter, public :: ANNULUS_STRATEGY_AUTO = 2
  integer(c_int32_t), parameter, public :: ANNULUS_STRATEGY_GRID = 3
  integer(c_int32_t), parameter, public :: ANNULUS_STRATEGY_ALL_GATHER = 4
  integer(c_int32_t), parameter, public :: ANNULUS_STRATEGY_ALL_TO_ALL = 5
  integer(c_int32_t), parameter, public :: ANNULUS_STRATEGY_ONCE_PER_NODE = 6
  integer(c_int32_t), parameter, public :: ANNULUS_STRATEGY_PASS_Q = 7
  integer(c_int32_t), parameter, public :: ANNULUS_BACKEND_CPU = 0
  integer(c_int32_t), parameter, public :: ANNULUS_BACKEND_WGPU = 1
  integer(c_int32_t), parameter, public :: ANNULUS_BACKEND_CUDA = 2
  integer(c_int32_t), parameter, public :: ANNULUS_BACKEND_HIP = 3
  ! options.toml: end
  integer(c_int32_t), parameter, public :: ANNULUS_MASK_PER_HEAD = 1
  integer(c_int32_t), parameter, public :: ANNULUS_MASK_PER_BATCH = 2
  integer(c_int32_t), parameter, public :: ANNULUS_PASS_FORWARD = 0
  integer(c_int32_t), parameter, public :: ANNULUS_PASS_BACKWARD = 1
  integer(c_int32_t), parameter, public :: ANNULUS_ACTIVITY_COMPUTE = 0
  integer(c_int32_t), parameter, public :: ANNULUS_ACTIVITY_SEND = 1
  integer(c_int32_t), parameter, public :: ANNULUS_ACTIVITY_WAIT = 2

  ! The definition of an attention. annulus_options_default sets the defaults.
  type, bind(c) :: annulus_options
    integer(c_int64_t) :: struct_size = 0
    ! options.toml: fields
    integer(c_int64_t) :: batch = 0
    integer(c_int64_t) :: q_len = 0
    integer(c_int64_t) :: kv_len = 0
    integer(c_int64_t) :: q_heads = 0
    integer(c_int64_t) :: kv_heads = 0
    integer(c_int64_t) :: head_dim = 0
    integer(c_int64_t) :: value_dim = 0
    integer(c_int32_t) :: dtype = 0
    integer(c_int32_t) :: causal = 0
    integer(c_int64_t) :: window_left = 0
    integer(c_int64_t) :: window_right = 0
    integer(c_int64_t) :: attention_sink_size = 0
    integer(c_int64_t) :: chunk_size = 0
    integer(c_int64_t) :: prefix_len = 0
    integer(c_int32_t) :: alignment = 0
    integer(c_int32_t) :: bias_order = 0
    integer(c_int32_t) :: has_softmax_scale = 0
    integer(c_int32_t) :: unnormalized = 0
    real(c_double) :: softmax_scale = 0.0_c_double
    real(c_double) :: logits_soft_cap = 0.0_c_double
    integer(c_int64_t) :: bias_dims(4) = 0
    integer(c_int64_t) :: sinks = 0
    integer(c_int32_t) :: sinks_per_head = 0
    integer(c_int32_t) :: logits_dtype = 0
    real(c_double) :: dropout_prob = 0.0_c_double
    integer(c_int64_t) :: dropout_seed = 0
    integer(c_int32_t) :: precision = 0
    integer(c_int32_t) :: backward_mode = 0
    integer(c_int32_t) :: forward_only = 0
    integer(c_int32_t) :: local_gradients = 0
    integer(c_int32_t) :: layout = 0
    integer(c_int32_t) :: route = 0
    real(c_double) :: deadline_seconds = 0.0_c_double
    integer(c_int64_t) :: threads = 0
    integer(c_int64_t) :: kv_block_size = 0
    real(c_double) :: arrival_deadline_seconds = 0.0_c_double
    integer(c_int32_t) :: adopt_communicator = 0
    integer(c_int32_t) :: reproducible = 0
    integer(c_int32_t) :: strategy = 0
    integer(c_int32_t) :: strategy_heads = 0
    integer(c_int32_t) :: strategy_queries = 0
    integer(c_int32_t) :: strategy_keys = 0
    integer(c_int64_t) :: page_rows = 0
    integer(c_int32_t) :: backend = 0
    integer(c_int32_t) :: has_device = 0
    integer(c_int64_t) :: device = 0
    integer(c_int64_t) :: receive_ahead = 0
    integer(c_int32_t) :: second_derivatives = 0
    integer(c_int32_t) :: statistics = 0
    ! options.toml: end
  end type annulus_options

  ! A tensor of C; annulus_tensor_of makes one of an array.
  type, bind(c) :: annulus_tensor
    type(c_ptr) :: data = c_null_ptr
    integer(c_int32_t) :: dtype = 0
    integer(c_int64_t) :: dims(4) = 0
    integer(c_int64_t) :: strides(4) = 0
  end type annulus_tensor

  ! Segment ids, positions, packed lengths, a dense mask and key lists.
  type, bind(c) :: annulus_batch
    integer(c_int64_t) :: struct_size = 0
    type(c_ptr) :: q_segment_ids = c_null_ptr
    type(c_ptr) :: kv_segment_ids = c_null_ptr
    type(c_ptr) :: q_positions = c_null_ptr
    type(c_ptr) :: kv_positions = c_null_ptr
    type(c_ptr) :: attention_mask = c_null_ptr
    type(c_ptr) :: cum_seqlens_q = c_null_ptr
    type(c_ptr) :: cum_seqlens_k = c_null_ptr
    type(c_ptr) :: key_list_offsets = c_null_ptr
    type(c_ptr) :: key_list_indices = c_null_ptr
    type(c_ptr) :: key_list_ends = c_null_ptr
    type(c_ptr) :: key_list_bias = c_null_ptr
  end type annulus_batch

  ! One pair of query and key, as a callback gets it.
  type, bind(c) :: annulus_pair
    integer(c_int64_t) :: batch = 0
    integer(c_int64_t) :: head = 0
    integer(c_int64_t) :: q_row = 0
    integer(c_int64_t) :: kv_row = 0
    integer(c_int64_t) :: q_position = 0
    integer(c_int64_t) :: kv_position = 0
  end type annulus_pair

  ! One activity of one rank in a pass, as a callback gets it.
  type, bind(c) :: annulus_step_event
    integer(c_int64_t) :: struct_size = 0
    integer(c_int64_t) :: rank = 0
    integer(c_int32_t) :: pass = 0
    integer(c_int32_t) :: activity = 0
    integer(c_int64_t) :: step = 0
    integer(c_int64_t) :: bytes = 0
    real(c_double) :: flops = 0.0_c_double
    real(c_double) :: begin_seconds = 0.0_c_double
    real(c_double) :: end_seconds = 0.0_c_double
  end type annulus_step_event

  ! The tensors of a forward pass.
  type, bind(c) :: annulus_forward_args
    integer(c_int64_t) :: struct_size = 0
    type(c_ptr) :: q = c_null_ptr
    type(c_ptr) :: k = c_null_ptr
    type(c_ptr) :: v = c_null_ptr
    type(c_ptr) :: bias = c_null_ptr
    type(c_ptr) :: softmax_aux = c_null_ptr
    type(c_ptr) :: out = c_null_ptr
    type(c_ptr) :: lse = c_null_ptr
    type(c_ptr) :: max = c_null_ptr
    type(c_ptr) :: sum = c_null_ptr
    type(c_ptr) :: ties = c_null_ptr
    ! of 16-bit elements only, which Fortran has none of
    type(c_ptr) :: out_residual = c_null_ptr
    type(c_ptr) :: statistics = c_null_ptr
    type(c_ptr) :: head_statistics = c_null_ptr
  end type annulus_forward_args

  ! The tensors of a backward pass.
  type, bind(c) :: annulus_backward_args
    integer(c_int64_t) :: struct_size = 0
    type(c_ptr) :: q = c_null_ptr
    type(c_ptr) :: k = c_null_ptr
    type(c_ptr) :: v = c_null_ptr
    type(c_ptr) :: bias = c_null_ptr
    type(c_ptr) :: softmax_aux = c_null_ptr
    type(c_ptr) :: out = c_null_ptr
    type(c_ptr) :: lse = c_null_ptr
    type(c_ptr) :: max = c_null_ptr
    type(c_ptr) :: ties = c_null_ptr
    type(c_ptr) :: dout = c_null_ptr
    type(c_ptr) :: dlse = c_null_ptr
    type(c_ptr) :: dq = c_null_ptr
    type(c_ptr) :: dk = c_null_ptr
    type(c_ptr) :: dv = c_null_ptr
    type(c_ptr) :: dbias = c_null_ptr
    type(c_ptr) :: dsoftmax_aux = c_null_ptr
    type(c_ptr) :: sum = c_null_ptr
    type(c_ptr) :: out_residual = c_null_ptr
  end type annulus_backward_args

  ! The tensors of a call of a KV cache.
  type, bind(c) :: annulus_attend_args
    integer(c_int64_t) :: struct_size = 0
    type(c_ptr) :: q = c_null_ptr
    type(c_ptr) :: softmax_aux = c_null_ptr
    type(c_ptr) :: out = c_null_ptr
    type(c_ptr) :: lse = c_null_ptr
  end type annulus_attend_args

  interface
    function c_options_init(options, struct_size) &
        bind(c, name="annulus_options_init") result(status)
      import :: annulus_options, c_int, c_int64_t
      type(annulus_options), intent(out) :: options
      integer(c_int64_t), value :: struct_size
      integer(c_int) :: status
    end function c_options_init

    function c_last_error() bind(c, name="annulus_last_error") result(text)
      import :: c_ptr
      type(c_ptr) :: text
    end function c_last_error

    function c_error_string(status) bind(c, name="annulus_error_string") result(text)
      import :: c_int, c_ptr
      integer(c_int), value :: status
      type(c_ptr) :: text
    end function c_error_string

    function c_version() bind(c, name="annulus_version") result(text)
      import :: c_ptr
      type(c_ptr) :: text
    end function c_version

    function c_strlen(text) bind(c, name="strlen") result(length)
      import :: c_ptr, c_size_t
      type(c_ptr), value :: text
      integer(c_size_t) :: length
    end function c_strlen

    ! Describes an attention; attention is its handle.
    function annulus_attention_create(options, attention) bind(c) result(status)
      import :: annulus_options, c_int, c_ptr
      type(annulus_options), intent(in) :: options
      type(c_ptr), intent(out) :: attention
      integer(c_int) :: status
    end function annulus_attention_create

    function annulus_attention_destroy(attention) bind(c) result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: attention
      integer(c_int) :: status
    end function annulus_attention_destroy

    function c_add_mask(attention, name, flags, visible, context) &
        bind(c, name="annulus_attention_add_mask") result(status)
      import :: c_char, c_funptr, c_int, c_int32_t, c_ptr
      type(c_ptr), value :: attention
      character(kind=c_char), intent(in) :: name(*)
      integer(c_int32_t), value :: flags
      type(c_funptr), value :: visible
      type(c_ptr), value :: context
      integer(c_int) :: status
    end function c_add_mask

    function c_add_neighborhood(attention, text) &
        bind(c, name="annulus_attention_add_neighborhood") result(status)
      import :: c_char, c_int, c_ptr
      type(c_ptr), value :: attention
      character(kind=c_char), intent(in) :: text(*)
      integer(c_int) :: status
    end function c_add_neighborhood

    function c_set_boxes_layout(attention, ranks, axes, shape) &
        bind(c, name="annulus_attention_set_boxes_layout") result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: attention
      integer(c_int64_t), value :: ranks, axes
      integer(c_int64_t), intent(in) :: shape(*)
      integer(c_int) :: status
    end function c_set_boxes_layout

    function c_set_bias_function(attention, name, bias, context) &
        bind(c, name="annulus_attention_set_bias_function") result(status)
      import :: c_char, c_funptr, c_int, c_ptr
      type(c_ptr), value :: attention
      character(kind=c_char), intent(in) :: name(*)
      type(c_funptr), value :: bias
      type(c_ptr), value :: context
      integer(c_int) :: status
    end function c_set_bias_function

    function c_set_alibi(attention, slopes, count) &
        bind(c, name="annulus_attention_set_alibi") result(status)
      import :: c_double, c_int, c_int64_t, c_ptr
      type(c_ptr), value :: attention
      real(c_double), intent(in) :: slopes(*)
      integer(c_int64_t), value :: count
      integer(c_int) :: status
    end function c_set_alibi

    ! Sets the rows of every rank, which count from 0, for ANNULUS_LAYOUT_CUSTOM.
    function annulus_attention_set_custom_layout(attention, ranks, q_counts, q_rows, kv_counts, &
        kv_rows) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: attention
      integer(c_int64_t), value :: ranks
      integer(c_int64_t), intent(in) :: q_counts(*), q_rows(*), kv_counts(*), kv_rows(*)
      integer(c_int) :: status
    end function annulus_attention_set_custom_layout

    ! Lets plans compute in a CUstream of a CUcontext, on tensors in device memory, which
    ! annulus_forward_c and annulus_backward_c take.
    function annulus_attention_set_cuda_stream(attention, context, stream) bind(c) result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: attention, context, stream
      integer(c_int) :: status
    end function annulus_attention_set_cuda_stream

    ! Lets blocks travel over an ncclComm_t, after annulus_attention_set_cuda_stream.
    function annulus_attention_set_nccl_communicator(attention, communicator) &
        bind(c) result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: attention, communicator
      integer(c_int) :: status
    end function annulus_attention_set_nccl_communicator

    function annulus_attention_on_silence(attention, silence, context) bind(c) result(status)
      import :: c_funptr, c_int, c_ptr
      type(c_ptr), value :: attention
      type(c_funptr), value :: silence
      type(c_ptr), value :: context
      integer(c_int) :: status
    end function annulus_attention_on_silence

    ! Sets the function that is called with every activity of a pass: c_funloc of a subroutine with
    ! bind(c) of (context, event), both type(c_ptr), value.
    function annulus_attention_on_step(attention, step, context) bind(c) result(status)
      import :: c_funptr, c_int, c_ptr
      type(c_ptr), value :: attention
      type(c_funptr), value :: step
      type(c_ptr), value :: context
      integer(c_int) :: status
    end function annulus_attention_on_step

    ! Plans a ring of threads in this process, over whole arrays.
    function annulus_plan_create_threads(attention, ranks, plan) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: attention
      integer(c_int64_t), value :: ranks
      type(c_ptr), intent(out) :: plan
      integer(c_int) :: status
    end function annulus_plan_create_threads

    ! Plans this rank of a ring over a communicator: comm, or comm%MPI_VAL of mpi_f08. Collective.
    function annulus_plan_create_mpi(attention, comm, plan) &
        bind(c, name="annulus_plan_create_mpi_f") result(status)
      import :: c_int, c_int32_t, c_ptr
      type(c_ptr), value :: attention
      integer(c_int32_t), value :: comm
      type(c_ptr), intent(out) :: plan
      integer(c_int) :: status
    end function annulus_plan_create_mpi

    ! Makes an endpoint over a communicator, comm or comm%MPI_VAL of mpi_f08, for several plans and
    ! caches. Of the attention only what concerns the communicator is used. Collective.
    function annulus_endpoint_create_mpi(attention, comm, endpoint) &
        bind(c, name="annulus_endpoint_create_mpi_f") result(status)
      import :: c_int, c_int32_t, c_ptr
      type(c_ptr), value :: attention
      integer(c_int32_t), value :: comm
      type(c_ptr), intent(out) :: endpoint
      integer(c_int) :: status
    end function annulus_endpoint_create_mpi

    ! Destroys the handle. Plans and caches over the endpoint live on.
    function annulus_endpoint_destroy(endpoint) bind(c) result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: endpoint
      integer(c_int) :: status
    end function annulus_endpoint_destroy

    ! Plans this rank of a ring over an endpoint. Collective, in the same order on all ranks.
    function annulus_plan_create_endpoint(attention, endpoint, plan) bind(c) result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: attention
      type(c_ptr), value :: endpoint
      type(c_ptr), intent(out) :: plan
      integer(c_int) :: status
    end function annulus_plan_create_endpoint

    function annulus_plan_destroy(plan) bind(c) result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: plan
      integer(c_int) :: status
    end function annulus_plan_destroy

    ! This rank.
    function annulus_plan_rank(plan, rank) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_int64_t), intent(out) :: rank
      integer(c_int) :: status
    end function annulus_plan_rank

    ! The number of ranks.
    function annulus_plan_ranks(plan, ranks) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_int64_t), intent(out) :: ranks
      integer(c_int) :: status
    end function annulus_plan_ranks

    ! The layout in force.
    function annulus_plan_layout(plan, layout) bind(c) result(status)
      import :: c_int, c_int32_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_int32_t), intent(out) :: layout
      integer(c_int) :: status
    end function annulus_plan_layout

    ! The route in force.
    function annulus_plan_route(plan, route) bind(c) result(status)
      import :: c_int, c_int32_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_int32_t), intent(out) :: route
      integer(c_int) :: status
    end function annulus_plan_route

    ! The strategy in force, and the ranks of a group (1 for the ring).
    function annulus_plan_strategy(plan, strategy, heads) bind(c) result(status)
      import :: c_int, c_int32_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_int32_t), intent(out) :: strategy, heads
      integer(c_int) :: status
    end function annulus_plan_strategy

    ! Parts into which the strategy in force divides queries and keys.
    function annulus_plan_grid(plan, queries, keys) bind(c) result(status)
      import :: c_int, c_int32_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_int32_t), intent(out) :: queries, keys
      integer(c_int) :: status
    end function annulus_plan_grid

    ! Bytes of the plan's buffers and scratch memory.
    function annulus_plan_workspace_bytes(plan, bytes) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_int64_t), intent(out) :: bytes
      integer(c_int) :: status
    end function annulus_plan_workspace_bytes

    ! Bytes of the messages that a pass sends: ANNULUS_PASS_FORWARD or ANNULUS_PASS_BACKWARD.
    function annulus_plan_predicted_bytes(plan, pass, bytes) bind(c) result(status)
      import :: c_int, c_int32_t, c_int64_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_int32_t), value :: pass
      integer(c_int64_t), intent(out) :: bytes
      integer(c_int) :: status
    end function annulus_plan_predicted_bytes

    function c_numerics(plan, text, capacity, length) &
        bind(c, name="annulus_plan_numerics") result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: plan, text
      integer(c_int64_t), value :: capacity
      integer(c_int64_t), intent(out) :: length
      integer(c_int) :: status
    end function c_numerics

    function c_q_rows(plan, rows, capacity, count) &
        bind(c, name="annulus_plan_q_rows") result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: plan, rows
      integer(c_int64_t), value :: capacity
      integer(c_int64_t), intent(out) :: count
      integer(c_int) :: status
    end function c_q_rows

    function c_kv_rows(plan, rows, capacity, count) &
        bind(c, name="annulus_plan_kv_rows") result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: plan, rows
      integer(c_int64_t), value :: capacity
      integer(c_int64_t), intent(out) :: count
      integer(c_int) :: status
    end function c_kv_rows

    function c_list_bias_gradient(plan, numbers, capacity, count) &
        bind(c, name="annulus_plan_list_bias_gradient") result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: plan, numbers
      integer(c_int64_t), value :: capacity
      integer(c_int64_t), intent(out) :: count
      integer(c_int) :: status
    end function c_list_bias_gradient

    function c_rank_q_rows(attention, ranks, rank, rows, capacity, count) &
        bind(c, name="annulus_attention_q_rows") result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: attention, rows
      integer(c_int64_t), value :: ranks, rank, capacity
      integer(c_int64_t), intent(out) :: count
      integer(c_int) :: status
    end function c_rank_q_rows

    function c_rank_kv_rows(attention, ranks, rank, rows, capacity, count) &
        bind(c, name="annulus_attention_kv_rows") result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: attention, rows
      integer(c_int64_t), value :: ranks, rank, capacity
      integer(c_int64_t), intent(out) :: count
      integer(c_int) :: status
    end function c_rank_kv_rows

    function c_set_balanced_layout(attention, ranks, batch) &
        bind(c, name="annulus_attention_set_balanced_layout") result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: attention, batch
      integer(c_int64_t), value :: ranks
      integer(c_int) :: status
    end function c_set_balanced_layout

    function c_set_documents(attention, batch) &
        bind(c, name="annulus_attention_set_documents") result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: attention, batch
      integer(c_int) :: status
    end function c_set_documents

    function c_update(plan, batch) bind(c, name="annulus_plan_update") result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: plan, batch
      integer(c_int) :: status
    end function c_update

    ! The forward pass over tensors of annulus_tensor_of, for every element type.
    function annulus_forward_c(plan, args) bind(c, name="annulus_forward") result(status)
      import :: annulus_forward_args, c_int, c_ptr
      type(c_ptr), value :: plan
      type(annulus_forward_args), intent(in) :: args
      integer(c_int) :: status
    end function annulus_forward_c

    ! The backward pass over tensors of annulus_tensor_of, for every element type.
    function annulus_backward_c(plan, args) bind(c, name="annulus_backward") result(status)
      import :: annulus_backward_args, c_int, c_ptr
      type(c_ptr), value :: plan
      type(annulus_backward_args), intent(in) :: args
      integer(c_int) :: status
    end function annulus_backward_c

    ! Starts a pass on a thread of its own; annulus_plan_test or annulus_plan_wait ends it. The
    ! arrays have ASYNCHRONOUS and TARGET, and stay as they are until then.
    function annulus_forward_start(plan, args) bind(c) result(status)
      import :: annulus_forward_args, c_int, c_ptr
      type(c_ptr), value :: plan
      type(annulus_forward_args), intent(in) :: args
      integer(c_int) :: status
    end function annulus_forward_start

    function annulus_backward_start(plan, args) bind(c) result(status)
      import :: annulus_backward_args, c_int, c_ptr
      type(c_ptr), value :: plan
      type(annulus_backward_args), intent(in) :: args
      integer(c_int) :: status
    end function annulus_backward_start

    ! done is 1 if the pass that was started has ended; the status is then that of the pass.
    function annulus_plan_test(plan, done) bind(c) result(status)
      import :: c_int, c_int32_t, c_ptr
      type(c_ptr), value :: plan
      integer(c_int32_t), intent(out) :: done
      integer(c_int) :: status
    end function annulus_plan_test

    function annulus_plan_wait(plan) bind(c) result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: plan
      integer(c_int) :: status
    end function annulus_plan_wait

    function c_set_machine(attention, path) &
        bind(c, name="annulus_attention_set_machine") result(status)
      import :: c_char, c_int, c_ptr
      type(c_ptr), value :: attention
      character(kind=c_char), intent(in) :: path(*)
      integer(c_int) :: status
    end function c_set_machine

    ! Makes the bias a table by relative positions.
    function c_set_bias_table(attention, kind) &
        bind(c, name="annulus_attention_set_bias_table") result(status)
      import :: c_char, c_int, c_ptr
      type(c_ptr), value :: attention
      character(kind=c_char), intent(in) :: kind(*)
      integer(c_int) :: status
    end function c_set_bias_table

    ! Creates an empty KV cache of ranks that are threads of this process.
    function annulus_cache_create_threads(attention, ranks, cache) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: attention
      integer(c_int64_t), value :: ranks
      type(c_ptr), intent(out) :: cache
      integer(c_int) :: status
    end function annulus_cache_create_threads

    ! Creates this rank of an empty KV cache over a communicator: comm, or comm%MPI_VAL of mpi_f08.
    ! Collective.
    function annulus_cache_create_mpi(attention, comm, cache) &
        bind(c, name="annulus_cache_create_mpi_f") result(status)
      import :: c_int, c_int32_t, c_ptr
      type(c_ptr), value :: attention
      integer(c_int32_t), value :: comm
      type(c_ptr), intent(out) :: cache
      integer(c_int) :: status
    end function annulus_cache_create_mpi

    ! Creates this rank of an empty KV cache over an endpoint. Collective, in the same order on all
    ! ranks.
    function annulus_cache_create_endpoint(attention, endpoint, cache) bind(c) result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: attention
      type(c_ptr), value :: endpoint
      type(c_ptr), intent(out) :: cache
      integer(c_int) :: status
    end function annulus_cache_create_endpoint

    function annulus_cache_destroy(cache) bind(c) result(status)
      import :: c_int, c_ptr
      type(c_ptr), value :: cache
      integer(c_int) :: status
    end function annulus_cache_destroy

    ! Appends rows, of tensors of annulus_tensor_of, for every element type.
    function annulus_cache_append_c(cache, k, v) &
        bind(c, name="annulus_cache_append") result(status)
      import :: annulus_tensor, c_int, c_ptr
      type(c_ptr), value :: cache
      type(annulus_tensor), intent(in) :: k, v
      integer(c_int) :: status
    end function annulus_cache_append_c

    ! Appends this rank's rows of the next count rows, for every element type.
    function annulus_cache_append_own_c(cache, count, k, v) &
        bind(c, name="annulus_cache_append_own") result(status)
      import :: annulus_tensor, c_int, c_int64_t, c_ptr
      type(c_ptr), value :: cache
      integer(c_int64_t), value :: count
      type(annulus_tensor), intent(in) :: k, v
      integer(c_int) :: status
    end function annulus_cache_append_own_c

    function c_own_rows(cache, next, rows, capacity, count) &
        bind(c, name="annulus_cache_own_rows") result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: cache, rows
      integer(c_int64_t), value :: next, capacity
      integer(c_int64_t), intent(out) :: count
      integer(c_int) :: status
    end function c_own_rows

    ! Removes the rows from len on, which count from 0.
    function annulus_cache_truncate(cache, len) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: cache
      integer(c_int64_t), value :: len
      integer(c_int) :: status
    end function annulus_cache_truncate

    ! Computes out and lse over tensors of annulus_tensor_of, for every element type. Collective.
    function annulus_cache_attend_c(cache, args) &
        bind(c, name="annulus_cache_attend") result(status)
      import :: annulus_attend_args, c_int, c_ptr
      type(c_ptr), value :: cache
      type(annulus_attend_args), intent(in) :: args
      integer(c_int) :: status
    end function annulus_cache_attend_c

    ! The number of cached rows of all ranks.
    function annulus_cache_len(cache, len) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: cache
      integer(c_int64_t), intent(out) :: len
      integer(c_int) :: status
    end function annulus_cache_len

    ! The number of cached rows of this rank; of all ranks in this process.
    function annulus_cache_local_len(cache, len) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: cache
      integer(c_int64_t), intent(out) :: len
      integer(c_int) :: status
    end function annulus_cache_local_len

    ! The rows of a page.
    function annulus_cache_page_rows(cache, rows) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: cache
      integer(c_int64_t), intent(out) :: rows
      integer(c_int) :: status
    end function annulus_cache_page_rows

    ! This rank.
    function annulus_cache_rank(cache, rank) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: cache
      integer(c_int64_t), intent(out) :: rank
      integer(c_int) :: status
    end function annulus_cache_rank

    ! The number of ranks.
    function annulus_cache_ranks(cache, ranks) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: cache
      integer(c_int64_t), intent(out) :: ranks
      integer(c_int) :: status
    end function annulus_cache_ranks

    ! Bytes of the messages that a call with so many queries sends.
    function annulus_cache_predicted_bytes(cache, queries, bytes) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: cache
      integer(c_int64_t), value :: queries
      integer(c_int64_t), intent(out) :: bytes
      integer(c_int) :: status
    end function annulus_cache_predicted_bytes

    ! Bytes of keys, values and message buffers.
    function annulus_cache_buffer_bytes(cache, bytes) bind(c) result(status)
      import :: c_int, c_int64_t, c_ptr
      type(c_ptr), value :: cache
      integer(c_int64_t), intent(out) :: bytes
      integer(c_int) :: status
    end function annulus_cache_buffer_bytes
  end interface

  ! Describes an array, without copying it. The array outlives the tensor, and has TARGET.
  interface annulus_tensor_of
    module procedure tensor_r32, tensor_r64, tensor_i32, tensor_i64, tensor_bool
  end interface annulus_tensor_of

  ! Computes out and lse. Collective.
  interface annulus_forward
    module procedure forward_r32, forward_r64
  end interface annulus_forward

  ! Computes the gradients. Collective.
  interface annulus_backward
    module procedure backward_r32, backward_r64
  end interface annulus_backward

  ! Appends rows that every rank passes: k(head_dim, kv_heads, rows, batch) and v. Local.
  interface annulus_cache_append
    module procedure append_r32, append_r64
  end interface annulus_cache_append

  ! Appends count rows, of which this rank passes those of annulus_cache_own_rows only. Local.
  interface annulus_cache_append_own
    module procedure append_own_r32, append_own_r64
  end interface annulus_cache_append_own

  ! Computes out and lse of the queries of the last cached rows. Collective.
  interface annulus_cache_attend
    module procedure attend_r32, attend_r64
  end interface annulus_cache_attend

contains

  ! Sets the defaults of all options.
  function annulus_options_default(options) result(status)
    type(annulus_options), intent(out) :: options
    integer(c_int) :: status
    status = c_options_init(options, int(c_sizeof(options), c_int64_t))
  end function annulus_options_default

  ! Returns the message of the last call that failed on this thread.
  function annulus_message() result(text)
    character(len=:), allocatable :: text
    text = text_of(c_last_error())
  end function annulus_message

  ! Returns the short text of a status.
  function annulus_error_text(status) result(text)
    integer(c_int), intent(in) :: status
    character(len=:), allocatable :: text
    text = text_of(c_error_string(status))
  end function annulus_error_text

  ! Returns the version of the library.
  function annulus_version_text() result(text)
    character(len=:), allocatable :: text
    text = text_of(c_version())
  end function annulus_version_text

  function text_of(pointer) result(text)
    type(c_ptr), intent(in) :: pointer
    character(len=:), allocatable :: text
    character(kind=c_char), pointer :: letters(:)
    integer(c_size_t) :: i
    call c_f_pointer(pointer, letters, [c_strlen(pointer)])
    allocate (character(len=size(letters)) :: text)
    do i = 1, size(letters, kind=c_size_t)
      text(i:i) = letters(i)
    end do
  end function text_of

  ! The letters of a text, with the zero that ends a text of C.
  pure function c_text(text) result(letters)
    character(len=*), intent(in) :: text
    character(kind=c_char) :: letters(len_trim(text) + 1)
    integer :: i
    do i = 1, len_trim(text)
      letters(i) = text(i:i)
    end do
    letters(len_trim(text) + 1) = c_null_char
  end function c_text

  ! Adds a mask: c_funloc of a function with bind(c), integer(c_int32_t), of (context, pair), both
  ! type(c_ptr), value.
  function annulus_attention_add_mask(attention, name, flags, visible, context) result(status)
    type(c_ptr), intent(in) :: attention
    character(len=*), intent(in) :: name
    integer(c_int32_t), intent(in) :: flags
    type(c_funptr), intent(in) :: visible
    type(c_ptr), intent(in) :: context
    integer(c_int) :: status
    status = c_add_mask(attention, c_text(name), flags, visible, context)
  end function annulus_attention_add_mask

  ! Adds a window on a grid of one to three axes, as '64x128:7x5', whose points are the positions in
  ! row-major order: the last axis varies fastest.
  function annulus_attention_add_neighborhood(attention, text) result(status)
    type(c_ptr), intent(in) :: attention
    character(len=*), intent(in) :: text
    integer(c_int) :: status
    status = c_add_neighborhood(attention, c_text(text))
  end function annulus_attention_add_neighborhood

  ! Gives every rank a box of a grid, for ANNULUS_LAYOUT_CUSTOM.
  function annulus_attention_set_boxes_layout(attention, ranks, shape) result(status)
    type(c_ptr), intent(in) :: attention
    integer(c_int64_t), intent(in) :: ranks
    integer(c_int64_t), intent(in) :: shape(:)
    integer(c_int) :: status
    status = c_set_boxes_layout(attention, ranks, size(shape, kind=c_int64_t), shape)
  end function annulus_attention_set_boxes_layout

  ! Sets a bias: c_funloc of a function with bind(c), real(c_double), of (context, pair), both
  ! type(c_ptr), value.
  function annulus_attention_set_bias_function(attention, name, bias, context) result(status)
    type(c_ptr), intent(in) :: attention
    character(len=*), intent(in) :: name
    type(c_funptr), intent(in) :: bias
    type(c_ptr), intent(in) :: context
    integer(c_int) :: status
    status = c_set_bias_function(attention, c_text(name), bias, context)
  end function annulus_attention_set_bias_function

  ! Sets the slopes of ALiBi, one per query head.
  function annulus_attention_set_alibi(attention, slopes) result(status)
    type(c_ptr), intent(in) :: attention
    real(c_double), intent(in) :: slopes(:)
    integer(c_int) :: status
    status = c_set_alibi(attention, slopes, size(slopes, kind=c_int64_t))
  end function annulus_attention_set_alibi

  ! Sets the machine of a machine file, for ANNULUS_STRATEGY_AUTO.
  function annulus_attention_set_machine(attention, path) result(status)
    type(c_ptr), intent(in) :: attention
    character(len=*), intent(in) :: path
    integer(c_int) :: status
    status = c_set_machine(attention, c_text(path))
  end function annulus_attention_set_machine

  ! Makes the bias a table by relative positions, such as 't5:32,128'.
  function annulus_attention_set_bias_table(attention, kind) result(status)
    type(c_ptr), intent(in) :: attention
    character(len=*), intent(in) :: kind
    integer(c_int) :: status
    status = c_set_bias_table(attention, c_text(kind))
  end function annulus_attention_set_bias_table

  ! Returns the rows of this rank among the next rows of a KV cache, which count from 0.
  function annulus_cache_own_rows(cache, next, rows) result(status)
    type(c_ptr), intent(in) :: cache
    integer(c_int64_t), intent(in) :: next
    integer(c_int64_t), allocatable, target, intent(out) :: rows(:)
    integer(c_int) :: status
    integer(c_int64_t) :: count, room
    status = c_own_rows(cache, next, c_null_ptr, 0_c_int64_t, count)
    if (status /= ANNULUS_SUCCESS) return
    ! one more, so that there is a first element to point to
    room = count + 1
    allocate (rows(room))
    status = c_own_rows(cache, next, c_loc(rows), room, count)
    rows = rows(:count)
  end function annulus_cache_own_rows

  ! Returns the fingerprint of the arithmetic: equal bits of reproducible plans need equal ones.
  ! Empty if the call fails.
  function annulus_plan_numerics(plan, text) result(status)
    type(c_ptr), intent(in) :: plan
    character(len=:), allocatable, intent(out) :: text
    integer(c_int) :: status
    character(kind=c_char), allocatable, target :: letters(:)
    integer(c_int64_t) :: capacity, length, i
    allocate (character(len=0) :: text)
    status = c_numerics(plan, c_null_ptr, 0_c_int64_t, length)
    if (status /= ANNULUS_SUCCESS) return
    capacity = length + 1
    allocate (letters(capacity))
    ! not length + 1: the call may overwrite length before the sum is computed
    status = c_numerics(plan, c_loc(letters), capacity, length)
    if (status /= ANNULUS_SUCCESS) return
    deallocate (text)
    allocate (character(len=length) :: text)
    do i = 1, length
      text(i:i) = letters(i)
    end do
  end function annulus_plan_numerics

  ! Returns the global query rows of this rank, which count from 0, in the order of its arrays.
  function annulus_plan_q_rows(plan, rows) result(status)
    type(c_ptr), intent(in) :: plan
    integer(c_int64_t), allocatable, intent(out) :: rows(:)
    integer(c_int) :: status
    status = rows_by(c_q_rows, plan, rows)
  end function annulus_plan_q_rows

  ! Returns the global key rows of this rank, which count from 0, in the order of its arrays.
  function annulus_plan_kv_rows(plan, rows) result(status)
    type(c_ptr), intent(in) :: plan
    integer(c_int64_t), allocatable, intent(out) :: rows(:)
    integer(c_int) :: status
    status = rows_by(c_kv_rows, plan, rows)
  end function annulus_plan_kv_rows

  function rows_by(function_of_c, plan, rows) result(status)
    procedure(c_q_rows) :: function_of_c
    type(c_ptr), intent(in) :: plan
    integer(c_int64_t), allocatable, target, intent(out) :: rows(:)
    integer(c_int) :: status
    integer(c_int64_t) :: count, room
    status = function_of_c(plan, c_null_ptr, 0_c_int64_t, count)
    if (status /= ANNULUS_SUCCESS) return
    ! one more, so that there is a first element to point to
    room = count + 1
    allocate (rows(room))
    status = function_of_c(plan, c_loc(rows), room, count)
    rows = rows(:count)
  end function rows_by

  ! Returns the global query rows of one rank of a ring, which count from 0 as the rank does, before
  ! there is a plan.
  function annulus_attention_q_rows(attention, ranks, rank, rows) result(status)
    type(c_ptr), intent(in) :: attention
    integer(c_int64_t), intent(in) :: ranks, rank
    integer(c_int64_t), allocatable, intent(out) :: rows(:)
    integer(c_int) :: status
    status = rank_rows_by(c_rank_q_rows, attention, ranks, rank, rows)
  end function annulus_attention_q_rows

  ! Returns the global key rows of one rank of a ring, before there is a plan.
  function annulus_attention_kv_rows(attention, ranks, rank, rows) result(status)
    type(c_ptr), intent(in) :: attention
    integer(c_int64_t), intent(in) :: ranks, rank
    integer(c_int64_t), allocatable, intent(out) :: rows(:)
    integer(c_int) :: status
    status = rank_rows_by(c_rank_kv_rows, attention, ranks, rank, rows)
  end function annulus_attention_kv_rows

  function rank_rows_by(function_of_c, attention, ranks, rank, rows) result(status)
    procedure(c_rank_q_rows) :: function_of_c
    type(c_ptr), intent(in) :: attention
    integer(c_int64_t), intent(in) :: ranks, rank
    integer(c_int64_t), allocatable, target, intent(out) :: rows(:)
    integer(c_int) :: status
    integer(c_int64_t) :: count, room
    status = function_of_c(attention, ranks, rank, c_null_ptr, 0_c_int64_t, count)
    if (status /= ANNULUS_SUCCESS) return
    ! one more, so that there is a first element to point to
    room = count + 1
    allocate (rows(room))
    status = function_of_c(attention, ranks, rank, c_loc(rows), room, count)
    rows = rows(:count)
  end function rank_rows_by

  ! Sets rows of equal numbers and work for the documents of a batch of all rows, for
  ! ANNULUS_LAYOUT_BALANCED. The arguments are those of annulus_plan_update, of all rows.
  function annulus_attention_set_balanced_layout(attention, ranks, q_segment_ids, kv_segment_ids, &
      q_positions, kv_positions, cum_seqlens_q, cum_seqlens_k) result(status)
    type(c_ptr), intent(in) :: attention
    integer(c_int64_t), intent(in) :: ranks
    integer(c_int32_t), intent(in), target, optional :: q_segment_ids(:, :), kv_segment_ids(:, :)
    integer(c_int64_t), intent(in), target, optional :: q_positions(:, :), kv_positions(:, :)
    integer(c_int64_t), intent(in), target, optional :: cum_seqlens_q(:), cum_seqlens_k(:)
    integer(c_int) :: status
    type(annulus_tensor), target :: tensors(11)
    type(annulus_batch), target :: batch
    call batch_of(batch, tensors, q_segment_ids, kv_segment_ids, q_positions, kv_positions, &
                  cum_seqlens_q=cum_seqlens_q, cum_seqlens_k=cum_seqlens_k)
    status = c_set_balanced_layout(attention, ranks, c_loc(batch))
  end function annulus_attention_set_balanced_layout

  ! Sets the documents of a batch of all rows, for which ANNULUS_STRATEGY_AUTO chooses. The
  ! arguments are those of annulus_plan_update, of all rows. Without any, documents are removed.
  function annulus_attention_set_documents(attention, q_segment_ids, kv_segment_ids, q_positions, &
      kv_positions, cum_seqlens_q, cum_seqlens_k) result(status)
    type(c_ptr), intent(in) :: attention
    integer(c_int32_t), intent(in), target, optional :: q_segment_ids(:, :), kv_segment_ids(:, :)
    integer(c_int64_t), intent(in), target, optional :: q_positions(:, :), kv_positions(:, :)
    integer(c_int64_t), intent(in), target, optional :: cum_seqlens_q(:), cum_seqlens_k(:)
    integer(c_int) :: status
    type(annulus_tensor), target :: tensors(11)
    type(annulus_batch), target :: batch
    if (present(q_segment_ids) .or. present(kv_segment_ids) .or. present(q_positions) .or. &
        present(kv_positions) .or. present(cum_seqlens_q) .or. present(cum_seqlens_k)) then
      call batch_of(batch, tensors, q_segment_ids, kv_segment_ids, q_positions, kv_positions, &
                    cum_seqlens_q=cum_seqlens_q, cum_seqlens_k=cum_seqlens_k)
      status = c_set_documents(attention, c_loc(batch))
    else
      status = c_set_documents(attention, c_null_ptr)
    end if
  end function annulus_attention_set_documents

  ! Makes a batch of the arrays that are present. It points to tensors, which point to the arrays.
  subroutine batch_of(batch, tensors, q_segment_ids, kv_segment_ids, q_positions, kv_positions, &
      attention_mask, cum_seqlens_q, cum_seqlens_k, key_list_offsets, key_list_indices, &
      key_list_ends, key_list_bias)
    type(annulus_batch), intent(out) :: batch
    type(annulus_tensor), intent(inout), target :: tensors(11)
    integer(c_int32_t), intent(in), target, optional :: q_segment_ids(:, :), kv_segment_ids(:, :)
    integer(c_int64_t), intent(in), target, optional :: q_positions(:, :), kv_positions(:, :)
    logical(c_bool), intent(in), target, optional :: attention_mask(:, :, :, :)
    integer(c_int64_t), intent(in), target, optional :: cum_seqlens_q(:), cum_seqlens_k(:)
    integer(c_int64_t), intent(in), target, optional :: key_list_offsets(:, :, :)
    integer(c_int64_t), intent(in), target, optional :: key_list_indices(:), key_list_ends(:)
    real(c_double), intent(in), target, optional :: key_list_bias(:)
    batch%struct_size = int(c_sizeof(batch), c_int64_t)
    batch%q_segment_ids = described(tensors(1), ANNULUS_I32, q_segment_ids)
    batch%kv_segment_ids = described(tensors(2), ANNULUS_I32, kv_segment_ids)
    batch%q_positions = described(tensors(3), ANNULUS_I64, q_positions)
    batch%kv_positions = described(tensors(4), ANNULUS_I64, kv_positions)
    batch%attention_mask = described(tensors(5), ANNULUS_BOOL, attention_mask)
    batch%cum_seqlens_q = described(tensors(6), ANNULUS_I64, cum_seqlens_q)
    batch%cum_seqlens_k = described(tensors(7), ANNULUS_I64, cum_seqlens_k)
    batch%key_list_offsets = described(tensors(8), ANNULUS_I64, key_list_offsets)
    batch%key_list_indices = described(tensors(9), ANNULUS_I64, key_list_indices)
    batch%key_list_ends = described(tensors(10), ANNULUS_I64, key_list_ends)
    batch%key_list_bias = described(tensors(11), ANNULUS_F64, key_list_bias)
  end subroutine batch_of

  ! The tensor of an array of one to four axes. Its strides are the distances of the first element
  ! from the second along each axis, or 0 where there is no second.
  function tensor_of(dtype, array) result(tensor)
    integer(c_int32_t), intent(in) :: dtype
    class(*), intent(in), target :: array(..)
    type(annulus_tensor) :: tensor
    integer(c_int64_t) :: last(4)
    type(c_ptr) :: elements(0:4)
    integer(c_intptr_t) :: first
    integer :: axis, axes
    axes = rank(array)
    last(:axes) = shape(array, kind=c_int64_t)
    tensor%dtype = dtype
    tensor%dims = 1
    tensor%dims(:axes) = last(axes:1:-1)
    ! an empty array has no address
    if (any(last(:axes) == 0)) return
    last(:axes) = min(last(:axes), 2_c_int64_t)
    select rank (array)
    rank (1)
      elements(:1) = [address(array(1)), address(array(last(1)))]
    rank (2)
      elements(:2) = [address(array(1, 1)), address(array(last(1), 1)), address(array(1, last(2)))]
    rank (3)
      elements(:3) = [address(array(1, 1, 1)), address(array(last(1), 1, 1)), &
                      address(array(1, last(2), 1)), address(array(1, 1, last(3)))]
    rank (4)
      elements = [address(array(1, 1, 1, 1)), address(array(last(1), 1, 1, 1)), &
                  address(array(1, last(2), 1, 1)), address(array(1, 1, last(3), 1)), &
                  address(array(1, 1, 1, last(4)))]
    end select
    tensor%data = elements(0)
    first = transfer(elements(0), first)
    do axis = 1, axes
      tensor%strides(axes + 1 - axis) = &
        8 * (transfer(elements(axis), first) - first) / storage_size(array)
    end do
  end function tensor_of

  ! The address of an element of any type.
  function address(element)
    type(*), intent(in), target :: element
    type(c_ptr) :: address
    address = c_loc(element)
  end function address

  function tensor_r32(array) result(tensor)
    real(c_float), intent(in), target :: array(..)
    type(annulus_tensor) :: tensor
    tensor = tensor_of(ANNULUS_F32, array)
  end function tensor_r32

  function tensor_r64(array) result(tensor)
    real(c_double), intent(in), target :: array(..)
    type(annulus_tensor) :: tensor
    tensor = tensor_of(ANNULUS_F64, array)
  end function tensor_r64

  function tensor_i32(array) result(tensor)
    integer(c_int32_t), intent(in), target :: array(..)
    type(annulus_tensor) :: tensor
    tensor = tensor_of(ANNULUS_I32, array)
  end function tensor_i32

  function tensor_i64(array) result(tensor)
    integer(c_int64_t), intent(in), target :: array(..)
    type(annulus_tensor) :: tensor
    tensor = tensor_of(ANNULUS_I64, array)
  end function tensor_i64

  function tensor_bool(array) result(tensor)
    logical(c_bool), intent(in), target :: array(..)
    type(annulus_tensor) :: tensor
    tensor = tensor_of(ANNULUS_BOOL, array)
  end function tensor_bool

  ! Adapts the plan to a batch, which stays in force; without arguments it removes the last one.
  ! Keys of lists count from 0, as all rows do. Collective.
  function annulus_plan_update(plan, q_segment_ids, kv_segment_ids, q_positions, kv_positions, &
      attention_mask, cum_seqlens_q, cum_seqlens_k, key_list_offsets, key_list_indices, &
      key_list_ends, key_list_bias) result(status)
    type(c_ptr), intent(in) :: plan
    integer(c_int32_t), intent(in), target, optional :: q_segment_ids(:, :), kv_segment_ids(:, :)
    integer(c_int64_t), intent(in), target, optional :: q_positions(:, :), kv_positions(:, :)
    logical(c_bool), intent(in), target, optional :: attention_mask(:, :, :, :)
    integer(c_int64_t), intent(in), target, optional :: cum_seqlens_q(:), cum_seqlens_k(:)
    integer(c_int64_t), intent(in), target, optional :: key_list_offsets(:, :, :)
    integer(c_int64_t), intent(in), target, optional :: key_list_indices(:), key_list_ends(:)
    real(c_double), intent(in), target, optional :: key_list_bias(:)
    integer(c_int) :: status
    type(annulus_tensor), target :: tensors(11)
    type(annulus_batch), target :: batch
    call batch_of(batch, tensors, q_segment_ids, kv_segment_ids, q_positions, kv_positions, &
                  attention_mask, cum_seqlens_q, cum_seqlens_k, key_list_offsets, &
                  key_list_indices, key_list_ends, key_list_bias)
    status = c_update(plan, c_loc(batch))
  end function annulus_plan_update

  ! Writes the gradient of key_list_bias that the last backward pass has computed.
  function annulus_plan_list_bias_gradient(plan, dkey_list_bias) result(status)
    type(c_ptr), intent(in) :: plan
    real(c_double), intent(out), target, contiguous :: dkey_list_bias(:)
    integer(c_int) :: status
    integer(c_int64_t) :: count
    status = c_list_bias_gradient(plan, c_loc(dkey_list_bias), &
                                  size(dkey_list_bias, kind=c_int64_t), count)
  end function annulus_plan_list_bias_gradient

  ! The forward pass over arrays whose elements are all of one type.
  function forward_of(plan, dtype, q, k, v, out, lse, bias, softmax_aux, max, sum, ties) &
      result(status)
    type(c_ptr), intent(in) :: plan
    integer(c_int32_t), intent(in) :: dtype
    class(*), intent(in), target :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :)
    class(*), intent(inout), target :: out(:, :, :, :), lse(:, :, :)
    class(*), intent(in), target, optional :: bias(:, :, :, :), softmax_aux(:, :)
    class(*), intent(inout), target, optional :: max(:, :, :), sum(:, :, :), ties(:, :, :)
    integer(c_int) :: status
    type(annulus_tensor), target :: tensors(10)
    type(annulus_forward_args) :: args
    args%struct_size = int(c_sizeof(args), c_int64_t)
    args%q = described(tensors(1), dtype, q)
    args%k = described(tensors(2), dtype, k)
    args%v = described(tensors(3), dtype, v)
    args%out = described(tensors(4), dtype, out)
    args%lse = described(tensors(5), dtype, lse)
    args%bias = described(tensors(6), dtype, bias)
    args%softmax_aux = described(tensors(7), dtype, softmax_aux)
    args%max = described(tensors(8), dtype, max)
    args%sum = described(tensors(9), dtype, sum)
    args%ties = described(tensors(10), dtype, ties)
    status = annulus_forward_c(plan, args)
  end function forward_of

  ! The backward pass over arrays whose elements are all of one type.
  function backward_of(plan, dtype, q, k, v, out, lse, dout, dq, dk, dv, dlse, bias, softmax_aux, &
      max, ties, dbias, dsoftmax_aux, sum) result(status)
    type(c_ptr), intent(in) :: plan
    integer(c_int32_t), intent(in) :: dtype
    class(*), intent(in), target :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :)
    class(*), intent(in), target :: out(:, :, :, :), lse(:, :, :), dout(:, :, :, :)
    class(*), intent(inout), target :: dq(:, :, :, :), dk(:, :, :, :), dv(:, :, :, :)
    class(*), intent(in), target, optional :: dlse(:, :, :), bias(:, :, :, :), softmax_aux(:, :)
    class(*), intent(in), target, optional :: max(:, :, :), ties(:, :, :), sum(:, :, :)
    class(*), intent(inout), target, optional :: dbias(:, :, :, :), dsoftmax_aux(:, :)
    integer(c_int) :: status
    type(annulus_tensor), target :: tensors(17)
    type(annulus_backward_args) :: args
    args%struct_size = int(c_sizeof(args), c_int64_t)
    args%q = described(tensors(1), dtype, q)
    args%k = described(tensors(2), dtype, k)
    args%v = described(tensors(3), dtype, v)
    args%out = described(tensors(4), dtype, out)
    args%lse = described(tensors(5), dtype, lse)
    args%dout = described(tensors(6), dtype, dout)
    args%dq = described(tensors(7), dtype, dq)
    args%dk = described(tensors(8), dtype, dk)
    args%dv = described(tensors(9), dtype, dv)
    args%dlse = described(tensors(10), dtype, dlse)
    args%bias = described(tensors(11), dtype, bias)
    args%softmax_aux = described(tensors(12), dtype, softmax_aux)
    args%max = described(tensors(13), dtype, max)
    args%ties = described(tensors(14), dtype, ties)
    args%dbias = described(tensors(15), dtype, dbias)
    args%dsoftmax_aux = described(tensors(16), dtype, dsoftmax_aux)
    args%sum = described(tensors(17), dtype, sum)
    status = annulus_backward_c(plan, args)
  end function backward_of

  ! The call of a KV cache over arrays whose elements are all of one type.
  function attend_of(cache, dtype, q, out, lse, softmax_aux) result(status)
    type(c_ptr), intent(in) :: cache
    integer(c_int32_t), intent(in) :: dtype
    class(*), intent(in), target :: q(:, :, :, :)
    class(*), intent(inout), target :: out(:, :, :, :), lse(:, :, :)
    class(*), intent(in), target, optional :: softmax_aux(:, :)
    integer(c_int) :: status
    type(annulus_tensor), target :: tensors(4)
    type(annulus_attend_args) :: args
    args%struct_size = int(c_sizeof(args), c_int64_t)
    args%q = described(tensors(1), dtype, q)
    args%out = described(tensors(2), dtype, out)
    args%lse = described(tensors(3), dtype, lse)
    args%softmax_aux = described(tensors(4), dtype, softmax_aux)
    status = annulus_cache_attend_c(cache, args)
  end function attend_of

  ! Describes an array that may be absent. Returns a pointer to the tensor, or NULL.
  function described(tensor, dtype, array) result(pointer)
    type(annulus_tensor), intent(inout), target :: tensor
    integer(c_int32_t), intent(in) :: dtype
    class(*), intent(in), target, optional :: array(..)
    type(c_ptr) :: pointer
    pointer = c_null_ptr
    if (.not. present(array)) return
    tensor = tensor_of(dtype, array)
    pointer = c_loc(tensor)
  end function described

  function forward_r32(plan, q, k, v, out, lse, bias, softmax_aux, max, sum, ties) result(status)
    type(c_ptr), intent(in) :: plan
    real(c_float), intent(in), target :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :)
    real(c_float), intent(inout), target :: out(:, :, :, :), lse(:, :, :)
    real(c_float), intent(in), target, optional :: bias(:, :, :, :), softmax_aux(:, :)
    real(c_float), intent(inout), target, optional :: max(:, :, :), sum(:, :, :), ties(:, :, :)
    integer(c_int) :: status
    status = forward_of(plan, ANNULUS_F32, q, k, v, out, lse, bias, softmax_aux, max, sum, ties)
  end function forward_r32

  function backward_r32(plan, q, k, v, out, lse, dout, dq, dk, dv, dlse, bias, softmax_aux, max, &
      ties, dbias, dsoftmax_aux, sum) result(status)
    type(c_ptr), intent(in) :: plan
    real(c_float), intent(in), target :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :)
    real(c_float), intent(in), target :: out(:, :, :, :), lse(:, :, :), dout(:, :, :, :)
    real(c_float), intent(inout), target :: dq(:, :, :, :), dk(:, :, :, :), dv(:, :, :, :)
    real(c_float), intent(in), target, optional :: dlse(:, :, :), bias(:, :, :, :)
    real(c_float), intent(in), target, optional :: softmax_aux(:, :), max(:, :, :), ties(:, :, :)
    real(c_float), intent(in), target, optional :: sum(:, :, :)
    real(c_float), intent(inout), target, optional :: dbias(:, :, :, :), dsoftmax_aux(:, :)
    integer(c_int) :: status
    status = backward_of(plan, ANNULUS_F32, q, k, v, out, lse, dout, dq, dk, dv, dlse, bias, &
                         softmax_aux, max, ties, dbias, dsoftmax_aux, sum)
  end function backward_r32

  function append_r32(cache, k, v) result(status)
    type(c_ptr), intent(in) :: cache
    real(c_float), intent(in), target :: k(:, :, :, :), v(:, :, :, :)
    integer(c_int) :: status
    status = annulus_cache_append_c(cache, tensor_of(ANNULUS_F32, k), tensor_of(ANNULUS_F32, v))
  end function append_r32

  function append_own_r32(cache, count, k, v) result(status)
    type(c_ptr), intent(in) :: cache
    integer(c_int64_t), intent(in) :: count
    real(c_float), intent(in), target :: k(:, :, :, :), v(:, :, :, :)
    integer(c_int) :: status
    status = annulus_cache_append_own_c(cache, count, tensor_of(ANNULUS_F32, k), &
                                        tensor_of(ANNULUS_F32, v))
  end function append_own_r32

  function attend_r32(cache, q, out, lse, softmax_aux) result(status)
    type(c_ptr), intent(in) :: cache
    real(c_float), intent(in), target :: q(:, :, :, :)
    real(c_float), intent(inout), target :: out(:, :, :, :), lse(:, :, :)
    real(c_float), intent(in), target, optional :: softmax_aux(:, :)
    integer(c_int) :: status
    status = attend_of(cache, ANNULUS_F32, q, out, lse, softmax_aux)
  end function attend_r32

  function forward_r64(plan, q, k, v, out, lse, bias, softmax_aux, max, sum, ties) result(status)
    type(c_ptr), intent(in) :: plan
    real(c_double), intent(in), target :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :)
    real(c_double), intent(inout), target :: out(:, :, :, :), lse(:, :, :)
    real(c_double), intent(in), target, optional :: bias(:, :, :, :), softmax_aux(:, :)
    real(c_double), intent(inout), target, optional :: max(:, :, :), sum(:, :, :), ties(:, :, :)
    integer(c_int) :: status
    status = forward_of(plan, ANNULUS_F64, q, k, v, out, lse, bias, softmax_aux, max, sum, ties)
  end function forward_r64

  function backward_r64(plan, q, k, v, out, lse, dout, dq, dk, dv, dlse, bias, softmax_aux, max, &
      ties, dbias, dsoftmax_aux, sum) result(status)
    type(c_ptr), intent(in) :: plan
    real(c_double), intent(in), target :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :)
    real(c_double), intent(in), target :: out(:, :, :, :), lse(:, :, :), dout(:, :, :, :)
    real(c_double), intent(inout), target :: dq(:, :, :, :), dk(:, :, :, :), dv(:, :, :, :)
    real(c_double), intent(in), target, optional :: dlse(:, :, :), bias(:, :, :, :)
    real(c_double), intent(in), target, optional :: softmax_aux(:, :), max(:, :, :), ties(:, :, :)
    real(c_double), intent(in), target, optional :: sum(:, :, :)
    real(c_double), intent(inout), target, optional :: dbias(:, :, :, :), dsoftmax_aux(:, :)
    integer(c_int) :: status
    status = backward_of(plan, ANNULUS_F64, q, k, v, out, lse, dout, dq, dk, dv, dlse, bias, &
                         softmax_aux, max, ties, dbias, dsoftmax_aux, sum)
  end function backward_r64

  function append_r64(cache, k, v) result(status)
    type(c_ptr), intent(in) :: cache
    real(c_double), intent(in), target :: k(:, :, :, :), v(:, :, :, :)
    integer(c_int) :: status
    status = annulus_cache_append_c(cache, tensor_of(ANNULUS_F64, k), tensor_of(ANNULUS_F64, v))
  end function append_r64

  function append_own_r64(cache, count, k, v) result(status)
    type(c_ptr), intent(in) :: cache
    integer(c_int64_t), intent(in) :: count
    real(c_double), intent(in), target :: k(:, :, :, :), v(:, :, :, :)
    integer(c_int) :: status
    status = annulus_cache_append_own_c(cache, count, tensor_of(ANNULUS_F64, k), &
                                        tensor_of(ANNULUS_F64, v))
  end function append_own_r64

  function attend_r64(cache, q, out, lse, softmax_aux) result(status)
    type(c_ptr), intent(in) :: cache
    real(c_double), intent(in), target :: q(:, :, :, :)
    real(c_double), intent(inout), target :: out(:, :, :, :), lse(:, :, :)
    real(c_double), intent(in), target, optional :: softmax_aux(:, :)
    integer(c_int) :: status
    status = attend_of(cache, ANNULUS_F64, q, out, lse, softmax_aux)
  end function attend_r64

end module annulus
