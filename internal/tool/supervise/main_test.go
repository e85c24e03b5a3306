package supervise

import (
	"testing"

	"csi-registrar/internal/test/fake"
)

func TestMain(m *testing.M) { fake.Main(m) }
