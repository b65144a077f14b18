// The same without libtorch: names, types, shapes and addresses.
#include <iostream>
#include <modelcache/client.hpp>

int main(int argc, char** argv) {
  auto client = modelcache::Client::Connect();
  if (!client.ok() || argc != 2) {
    std::cerr << "raw_tensors: " << (argc != 2 ? "usage: raw_tensors PATH" : client.error().message)
              << '\n';
    return 1;
  }
  auto model = client->Open(argv[1]);
  if (!model.ok()) {
    std::cerr << "raw_tensors: " << model.error().name() << ": " << model.error().message << '\n';
    return 1;
  }
  for (const modelcache::TensorView& tensor : model->Tensors()) {
    std::cout << tensor.name() << ' ' << tensor.dtype() << " [";
    for (const std::int64_t size : tensor.shape()) {
      std::cout << ' ' << size;
    }
    std::cout << " ] at " << tensor.data() << ", " << tensor.nbytes() << " bytes\n";
  }
  return 0;
}
