// The backend of ggml: one device, tensors in ggml's own CPU buffers, FLASH_ATTN_EXT only. ggml
// calls ggml_backend_init of the library that GGML_BACKEND_PATH names.
#include "attention.hpp"

#include <ggml-backend-impl.h>
#include <ggml-impl.h>

#include <string>

namespace {

using ggml_annulus::Attention;
using Device = ggml_backend_dev_t;
using Registry = ggml_backend_reg_t;

constexpr char NAME[] = "ANNULUS";
ggml_guid GUID = {0x4d, 0x9b, 0x1e, 0x60, 0x2a, 0xc7, 0x47, 0x35,
                  0x9f, 0x08, 0xd3, 0x5e, 0x71, 0xbc, 0x0a, 0xe6};

bool is_view(ggml_op op) {
  return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW ||
         op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

Attention &attention(ggml_backend_t backend) { return *static_cast<Attention *>(backend->context); }

void set_threads(ggml_backend_t backend, int threads) { attention(backend).set_threads(threads); }

ggml_status compute(ggml_backend_t backend, ggml_cgraph *graph) {
  for (int index = 0; index < graph->n_nodes; index++) {
    const ggml_tensor *node = graph->nodes[index];
    if (is_view(node->op) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) continue;
    try {
      attention(backend).compute(node);
    } catch (const std::exception &error) {
      GGML_LOG_ERROR("%s: %s: %s\n", NAME, node->name, error.what());
      return GGML_STATUS_FAILED;
    }
  }
  return GGML_STATUS_SUCCESS;
}

ggml_backend_t open(Device device, const char *) {
  ggml_backend_i functions{};
  functions.get_name = [](ggml_backend_t) { return NAME; };
  functions.free = [](ggml_backend_t backend) {
    delete &attention(backend);
    delete backend;
  };
  functions.graph_compute = compute;
  return new ggml_backend{&GUID, functions, device, new Attention};
}

bool supports(Device, const ggml_tensor *node) {
  if (is_view(node->op)) return true;
  if (node->op != GGML_OP_FLASH_ATTN_EXT) return false;
  return !ggml_annulus::Node(node).refusal(node);
}

const char *description(Device) {
  static const std::string text = std::string("attention by annulus ") + annulus_version();
  return text.c_str();
}

void properties(Device device, ggml_backend_dev_props *all) {
  *all = {};
  all->name = NAME;
  all->description = description(device);
  all->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
  all->caps.buffer_from_host_ptr = true;
}

Device device(Registry registry, size_t) {
  static ggml_backend_device only = [registry] {
    ggml_backend_device_i functions{};
    functions.get_name = [](Device) { return NAME; };
    functions.get_description = description;
    functions.get_memory = [](Device, size_t *free, size_t *total) { *free = *total = 0; };
    functions.get_type = [](Device) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
    functions.get_props = properties;
    functions.init_backend = open;
    functions.get_buffer_type = [](Device) { return ggml_backend_cpu_buffer_type(); };
    functions.buffer_from_host_ptr = [](Device, void *data, size_t size, size_t) {
      return ggml_backend_cpu_buffer_from_ptr(data, size);
    };
    functions.supports_op = supports;
    functions.supports_buft = [](Device, ggml_backend_buffer_type_t buffers) {
      return ggml_backend_buft_is_host(buffers);
    };
    return ggml_backend_device{functions, registry, nullptr};
  }();
  return &only;
}

void *function(Registry, const char *name) {
  const bool threads = std::strcmp(name, "ggml_backend_set_n_threads") == 0;
  return threads ? reinterpret_cast<void *>(set_threads) : nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Registry ggml_backend_init() {
  static ggml_backend_reg registry{};
  registry.api_version = GGML_BACKEND_API_VERSION;
  registry.iface.get_name = [](Registry) { return NAME; };
  registry.iface.get_device_count = [](Registry) { return size_t{1}; };
  registry.iface.get_device = device;
  registry.iface.get_proc_address = function;
  return &registry;
}
